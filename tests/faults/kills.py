"""Seeded kills of ranks and launchers at all moments of a run: each run ends by itself, with the policy, the
metrics, the evaluations and the best policy of the run never killed, in float64 to the last bit, and
generates no response twice that stands in a journal.

    one run that nobody disturbs ─▶ how often each function is called
    run by run: some kills, one in each attempt ─▶ the launcher, or this script for the launcher, starts again
                                                ─▶ the same in all four, and nothing generated twice

    python -m tests.faults.kills --kills 200 --seed 11 --out benchmarks/results/faults/kills

With --turns the policy calls tools that count their calls, stops come among the kills, and no call is made
again whose result stands in a journal.

Recovery is the time from a kill to when the next attempt goes on to train: meeting, loading, reading the
journal. Ranks are forked here from a launcher that has imported all; in `tlt train`, which spawns them,
importing comes on top of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.compare import difference
from tests.faults.report import Text, begin, make_parser, write
from tests.faults.victim import ANYWHERE, LAUNCHER, MOMENTS, Kill, read_events
from tests.faults.workspace import make_chat_models, make_models

TIMEOUT_SECONDS = 1800.0
"""Of a run with all its kills: one that takes longer hangs."""
KILLS_OF_A_RUN = 8
LEADERS = {"record", "manifest", "removing older", "products", "evaluation"}
"""Moments that rank 0 alone comes to, or does something in."""
LAUNCHER_SHARE, ANYWHERE_SHARE, STOP_SHARE = 0.1, 0.2, 0.2
EARLY = 0.1
"""Share of a run in which an attempt is killed: with eight kills most of them come about before the run
ends."""
RUN = """
[run]
num_steps = {num_steps}
num_ranks = 2
dtype = "float64"
checkpoint_every = 2
timeout_seconds = 120
[model]
path = "model"
[task]
name = "digits:TASK"
num_problems = 12
[rollout]
problems_per_step = 4
samples_per_problem = 4
max_batch_size = 6
speculation = "2x1x2"
[sampling]
max_tokens = 64
[drafter]
path = "drafter"
train = true
[optimizer]
learning_rate = 3e-3
[evaluation]
every = 3
num_problems = 4
samples_per_problem = 2
"""

TOOLS = """
[environment]
tools = ["tests.unit.training.environments.tools:add", "tests.unit.training.environments.tools:look_up"]
max_turns = 4
num_workers = 1
[rewards]
functions = ["tests.unit.training.environments.tools:score"]
"""
CHANGES = {
    'name = "digits:TASK"\nnum_problems = 12': 'name = "data"\ndata = "rows.jsonl"\nsplit = "train[:-4]"',
    "every = 3": 'every = 3\nsplit = "train[-4:]"',
    "max_tokens = 64": 'max_tokens = 400\nstop = ["</tool_call>"]',
}
"""Of RUN, for turns."""
CALLS = "TLT_TEST_CALLS"
"""Variable of the environment: the file in which the tools write their calls, a line each."""


def make_workspace(folder: Path, num_steps: int = 12) -> None:
    """Writes all that a run takes, and its configuration."""
    make_models(folder)
    (folder / "run.toml").write_text(RUN.format(num_steps=num_steps))


def make_talking_workspace(folder: Path, num_steps: int = 12) -> None:
    """The same for a run whose policy calls tools."""
    make_chat_models(folder)
    rows = [{"prompt": f"{number} + {number}?"} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RUN.format(num_steps=num_steps)
    for old, new in CHANGES.items():
        text = text.replace(old, new)
    (folder / "run.toml").write_text(text + TOOLS)


def generate_ahead(folder: Path, num_steps: int) -> None:
    """Lets the runs from now on generate so many steps ahead, and draft from that."""
    config = folder / "run.toml"
    rollout = f'"ahead+hybrid:64x1x64"\nahead = {num_steps}'
    config.write_text(config.read_text().replace('"2x1x2"', rollout))


def run_with(workspace: Path, name: str, plan: Sequence[Kill]) -> dict[str, Any]:
    """Runs to the end, whatever is killed, and returns what happened. A launcher that was killed is
    started again."""
    folder = workspace / name
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps([asdict(kill) for kill in plan]))
    words = [sys.executable, "-m", "tests.faults.victim", str(folder)]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(workspace), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        CALLS: str(folder / "calls.txt"),
    }
    deadline = time.monotonic() + TIMEOUT_SECONDS
    said = ""
    while True:
        try:
            left = deadline - time.monotonic()
            done = subprocess.run(
                words, env=environ, capture_output=True, text=True, check=False, timeout=left
            )
        except subprocess.TimeoutExpired as late:
            return {"outcome": f"hangs: {late.stdout!r}", "events": read_events(folder), "said": said}
        said += done.stdout + done.stderr
        if done.returncode == 0:
            return {"outcome": "ended", "events": read_events(folder), "said": said}
        is_busy = "another process is running in" in done.stderr  # a killed launcher's rank has not ended yet
        if not is_busy and done.returncode not in (-signal.SIGKILL, 128 + signal.SIGTERM):
            return {"outcome": f"exit code {done.returncode}: {said}"}
        time.sleep(0.5)


def draw(rng: random.Random, calls: Sequence[Mapping[str, int]], seconds: float, stops: bool = False) -> Kill:
    """Returns a kill at random, the same chance for every moment, early in an attempt, which may have little
    left to do. calls: by rank, how often each moment comes in a whole run.
    seconds: of training in a whole run. stops: with stops in order among them."""
    if stops and rng.random() < STOP_SHARE:
        return Kill(ANYWHERE, LAUNCHER, seconds=rng.uniform(0, EARLY * seconds), signal=signal.SIGTERM)
    chance = rng.random()
    if chance < LAUNCHER_SHARE:
        return Kill(ANYWHERE, LAUNCHER, seconds=rng.uniform(0, EARLY * seconds))
    if chance < LAUNCHER_SHARE + ANYWHERE_SHARE:
        return Kill(ANYWHERE, rng.randrange(2), seconds=rng.uniform(0, EARLY * seconds))
    moment = rng.choice([moment for moment in sorted(MOMENTS) if any(moment in of_rank for of_rank in calls)])
    rank = 0 if moment in LEADERS else rng.randrange(2)
    return Kill(moment, rank, rng.randint(1, max(int(EARLY * calls[rank].get(moment, 1)), 1)))


def measure(options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    report: dict[str, Any] = {
        **begin(
            f"kills --kills {options.kills} --seed {options.seed} --ahead {options.ahead}"
            + " --turns" * options.turns
        ),
        "ahead": options.ahead,
        "turns": options.turns,
        "kills": [],
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        (make_talking_workspace if options.turns else make_workspace)(workspace)
        began = time.time()
        whole = run_with(workspace, "whole", [])
        assert whole["outcome"] == "ended", whole["outcome"]
        name_of_counted = "whole"
        if options.ahead:
            generate_ahead(workspace, options.ahead)
            name_of_counted = "counted"
            whole = run_with(workspace, name_of_counted, [])
        seconds = time.time() - whole["events"][0]["ready"]
        report["undisturbed_seconds"] = time.time() - began
        report["num_calls"] = num_calls(workspace / name_of_counted)
        calls = [
            json.loads((workspace / name_of_counted / f"calls-{rank}.json").read_text()) for rank in range(2)
        ]
        while len(report["kills"]) < options.kills:
            num = min(KILLS_OF_A_RUN, options.kills - len(report["kills"]))
            plan = [draw(rng, calls, seconds, options.turns) for _ in range(num)]
            folder = f"run-{len(report['runs'])}"
            began = time.time()
            result = run_with(workspace, folder, plan)
            if result["outcome"] == "ended":
                differs = difference(workspace / folder / "run", workspace / "whole" / "run")
                result["outcome"] = differs or "same"
            events = result.get("events", [])
            killed, twice = recoveries(plan, events), [event["twice"] for event in events if "twice" in event]
            report["kills"] += killed
            outcome = result["outcome"]
            said = result.get("said", "") if outcome != "same" or twice else ""
            told = {"kills": len(killed), "seconds": time.time() - began, "outcome": outcome}
            if options.turns:
                told["num_calls"] = num_calls(workspace / folder)
            report["runs"].append({**told, "twice": twice, "said": said})
            print(json.dumps(report["runs"][-1]), flush=True)
            write(options.out, report, text_of(report))
            if not killed and outcome != "same":
                break  # the run has ended for another reason, which the outcome tells
    return int(any(run["outcome"] != "same" or run["twice"] for run in report["runs"]))


def num_calls(folder: Path) -> int:
    """Of tools, by all attempts of a run, those of results included that no journal holds."""
    path = folder / "calls.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


def recoveries(plan: Sequence[Kill], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the kills that were carried out, each with the seconds until training went on; None: another
    one came before."""
    found = []
    for place, event in enumerate(events):
        if "kill" in event:
            after = events[place + 1] if place + 1 < len(events) else {}
            seconds = after["ready"] - event["at"] if "ready" in after else None
            found.append({**asdict(plan[event["kill"]]), "recovery_seconds": seconds})
    return found


def text_of(report: Mapping[str, Any]) -> Text:
    by_moment: dict[str, list[float | None]] = defaultdict(list)
    for kill in report["kills"]:
        name = f"{kill['moment']}, the launcher" if kill["rank"] == LAUNCHER else kill["moment"]
        name = f"{name} (a stop)" if kill["signal"] == signal.SIGTERM else name
        by_moment[name].append(kill["recovery_seconds"])
    rows = []
    for moment, seconds in sorted(by_moment.items()):
        known = [value for value in seconds if value is not None]
        told = (f"{f(known):.1f}" if known else "–" for f in (statistics.median, max))
        rows.append([moment, len(seconds), *told])
    runs = report["runs"]
    same = sum(run["outcome"] == "same" for run in runs)
    twice = sum(len(run["twice"]) for run in runs)
    never = "that was never killed, and generated nothing ahead" if report["ahead"] else "never killed"
    text = (
        f"{len(report['kills'])} kills in {len(runs)} runs. {same} runs ended by themselves with the policy, "
        f"metrics, evaluations and best policy of the run {never}, to the last bit. Responses of a journal "
        "that "
        f"were generated again: {twice}."
    )
    if report["turns"]:
        more = [run["num_calls"] - report["num_calls"] for run in runs if run["outcome"] == "same"]
        text += (
            f" Calls of a journal that were made again stand among them. The run never killed made "
            f"{report['num_calls']} calls; the others {max(min(more), 0)} to {max(more)} more, of which no result "
            "was written before the kill."
        )
    columns = ["killed in", "kills", "recovery, s (median)", "(most)"]
    return "Kills at all moments", text, columns, rows


def main() -> None:
    parser = make_parser("kills", __doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--ahead", type=int, default=0, help="steps that idle ranks generate ahead")
    parser.add_argument("--turns", action="store_true", help="a policy that calls tools, and stops")
    sys.exit(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
