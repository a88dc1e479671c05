"""Trackers in whole runs: what they are told of a run and its continuation, and that the run outlives
them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.integration.test_run import command, records

OWN = """
import json, os

class Diary:
    def begin(self, run):
        self.path = run.folder / "diary.jsonl"
        self.note("begin", run.run_id, run.step, run.config["sampling"]["max_tokens"])
    def log(self, step, values): self.note("log", step, values)
    def finish(self): self.note("finish")
    def note(self, *line):
        with self.path.open("a") as file: file.write(json.dumps(line) + "\\n")

class Dies(Diary):
    def begin(self, run): return "alive"
    def log(self, step, values): os._exit(9)
"""


def run(workspace: Path, *words: str) -> str:
    told, environment = command(workspace, *words)
    done = subprocess.run(told, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_run_and_its_continuation_are_one_run_to_a_tracker_and_outlive_one_that_dies(
    workspace: Path,
) -> None:
    (workspace / "own_trackers.py").write_text(OWN)
    folder = workspace / "tracked"
    own = ("--tracking.use", "own_trackers:Diary,own_trackers:Dies", "--rollout.speculation", "4x1x4")
    printed = run(
        workspace, str(workspace / "run.toml"), "--run.out_dir", str(folder), "--run.num_steps", "2", *own
    )
    assert printed.count("own_trackers:Dies: its process ended: exit code 9; the run goes on") == 1, printed
    run(workspace, "--resume", str(folder), "--run.num_steps", "3")
    lines = [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]
    begins = [line for line in lines if line[0] == "begin"]
    assert [begin[2:] for begin in begins] == [[0, 48], [2, 48]]
    assert begins[0][1] == begins[1][1] == json.loads((folder / "tracking.json").read_text())["run_id"]
    assert [line[0] for line in lines].count("finish") == 2
    logs = [(line[1], line[2]) for line in lines if line[0] == "log"]
    steps = [(step, values) for step, values in logs if "update/loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert [step for step, values in logs if "eval/solve_rate" in values] == [0, 2, 3]
    for (_, values), record in zip(steps, records(folder), strict=True):
        assert values["rewards/mean"] == record.rewards.mean
        assert values["rollout/draft_acceptance_rate"] == record.rollout.draft_acceptance_rate
        assert values["rollout/draft_acceptance_rate_pos_2"] == record.rollout.draft_acceptance_rate_pos[1]
        assert 1 <= values["rollout/draft_mean_acceptance_length"] <= 5
