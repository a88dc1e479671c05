"""Runs with tools whose processes are killed: they end as the run that was never disturbed, and no call is made
again whose result was written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.left import children
from tests.integration.programs import Programs
from tests.unit.models.hf.checkpoint_parts import hash_of
from tests.unit.training.environments import parts
from tests.unit.training.environments.test_turns import TOOLS, configure, tokens_of
from tlt.base.types import ResponseId
from tlt.training.saved.journal_file import read_record, read_records

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 2


def begin(programs: Programs, config: Any, path: Path, calls: Path, *words: str) -> int:
    """Returns the process that begins the run, or goes on with it."""
    path.write_text(config.to_json())
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TLT_TEST_CALLS": str(calls),
        "TLT_TEST_DELAY": "0.02",
    }
    command = [sys.executable, "-m", "tlt", "train", *(words or [str(path)])]
    with (path.parent / "output.log").open("ab") as log:
        return programs.begin(command, environment, (log.fileno(), log.fileno()))


def finish(programs: Programs, *what: Any) -> None:
    begin(programs, *what)
    assert programs.wait(300) == 0


def is_running(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def kill_all(programs: Programs, process: int) -> None:
    """The launcher alone would have its ranks stop in order, with a checkpoint."""
    ranks = children(process)
    for one in (process, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    programs.wait(60)
    time.sleep(1.0)  # workers end with their rank


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def reached(messages: list[Mapping[str, Any]]) -> int:
    """Results of calls that a tool was asked for."""
    said = [message["content"] for message in messages if message["role"] == "tool"]
    no_tool = ("missing a required argument", "there is no tool", "cannot be read")
    return sum(not any(text in content for text in no_tool) for content in said)


def written(folder: Path) -> int:
    """Results in the journal, of all steps."""
    most: dict[tuple[str, ResponseId], int] = {}
    for file in folder.glob("journal/step-*/replica-*"):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:  # a resumed run removes files
            read_record(opened)
            for _, record in read_records(opened):
                if turns := record.about.get("turns"):
                    key = record.about["phase"], tuple(record.about["key"])
                    most[key] = max(most.get(key, 0), reached(turns["messages"]))
    return sum(most.values())


def num_scored(folder: Path) -> int:
    """Rewards in the journal, of all attempts."""
    num = 0
    for file in folder.glob("journal/step-*/replica-*"):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:  # a resumed run removes files
            read_record(opened)
            num += sum(record.about["kind"] == "reward" for _, record in read_records(opened))
    return num


def steps_of(num_ranks: int, folder: Path) -> dict[str, Any]:
    sizes = {"num_ranks": num_ranks, "num_steps": NUM_STEPS, "max_restarts": 0}
    return {**sizes, "out_dir": str(folder), "device": "cpu", "dtype": "float64"}


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_kills_rewards_read_the_environments_that_were_left(
    tmp_path: Path, programs: Programs, num_ranks: int
) -> None:
    model = parts.write_model(tmp_path / "model")

    def config(name: str) -> Any:
        rollout = {"problems_per_step": 4, "samples_per_problem": 6, "max_batch_size": 6}
        rewards = {"functions": [f"{TOOLS}:guessed"]}
        run = steps_of(num_ranks, tmp_path / name)
        return configure(model, tmp_path / name, "game", run=run, rollout=rollout, rewards=rewards)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(programs, config("whole"), tmp_path / "whole.json", tmp_path / "calls")
    words: tuple[str, ...] = ()
    for more in (3, 14):
        program = begin(programs, config("killed"), tmp_path / "killed.json", tmp_path / "calls", *words)
        before = num_scored(killed)
        while num_scored(killed) < before + more and is_running(program):
            time.sleep(0.02)
        kill_all(programs, program)
        words = ("--resume", str(killed))
    finish(programs, config("killed"), tmp_path / "killed.json", tmp_path / "calls", *words)
    assert hash_of(killed / "policy") == hash_of(whole / "policy")
    assert sorted(tokens_of(killed)) == sorted(tokens_of(whole))
    found, known = ([json.loads(line) for line in lines(of / "metrics.jsonl")] for of in (killed, whole))
    assert [step["rewards"] for step in found] == [step["rewards"] for step in known]
    assert sum(step["rollout"]["recalled_tokens"] for step in found) > 0
    assert all(step["rewards"]["parts"]["guessed"] > 0 for step in known)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_kills_the_run_is_the_one_never_disturbed(
    tmp_path: Path, programs: Programs, num_ranks: int
) -> None:
    model = parts.write_model(tmp_path / "model")

    def config(name: str) -> Any:
        run = steps_of(num_ranks, tmp_path / name)
        rollout = {"problems_per_step": 4, "samples_per_problem": 6, "max_batch_size": 6}
        return configure(model, tmp_path / name, "tools", run=run, rollout=rollout)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(programs, config("whole"), tmp_path / "whole.json", tmp_path / "whole.calls")
    total = len(lines(tmp_path / "whole.calls"))
    assert total > 20
    calls = tmp_path / "killed.calls"
    words: tuple[str, ...] = ()
    settled = 0
    for asked in (total // 5, total * 4 // 5):
        program = begin(programs, config("killed"), tmp_path / "killed.json", calls, *words)
        before = len(lines(calls))
        while len(lines(calls)) < before + max(asked - settled, 1) and is_running(program):
            time.sleep(0.02)
        kill_all(programs, program)
        settled = written(killed)
        words = ("--resume", str(killed))
    before = len(lines(calls))
    finish(programs, config("killed"), tmp_path / "killed.json", calls, *words)
    assert len(lines(calls)) - before == total - settled
    assert settled > total // 4
    assert hash_of(killed / "policy") == hash_of(whole / "policy")
    assert sorted(tokens_of(killed)) == sorted(tokens_of(whole))
    rewards = [json.loads(line)["rewards"] for line in lines(killed / "metrics.jsonl")]
    assert rewards == [json.loads(line)["rewards"] for line in lines(whole / "metrics.jsonl")]
