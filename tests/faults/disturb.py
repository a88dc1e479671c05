"""Disturbs a small run of two ranks at its reward workers, its signals, its screen and its clock, each kind
in a run by itself: it ends, resumed where it was stopped, with the policy, the metrics, the evaluations and
the best policy of the run that nobody disturbed, in float64 to the last bit, and leaves no process behind.

    one run that nobody disturbs
    kind by kind: tlt train … --resume auto ─▶ once.py, in a reward worker or a rank, does one thing once
                  ─▶ the exit code that the kind expects; stopped: the same command again ─▶ compare.py

    python -m tests.faults.disturb --out benchmarks/results/faults/disturb

Ranks are forked from a process that has imported all, but where their import or their clock is what is
disturbed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.commands import Command, Ending, adopt_orphans, run
from tests.faults.compare import difference
from tests.faults.kills import make_workspace
from tests.faults.left import children, command_line, descendants
from tests.faults.once import passes
from tests.faults.report import Text, begin, make_parser, write
from tests.faults.victim import MOMENTS, before, fork_ranks
from tests.faults.workspace import PASSING_TASK, ROOT
from tlt.apps.cli.main import main as tlt

LIMIT_SECONDS = 300.0
"""Of a command: one that takes longer hangs."""
PATIENCE = 60.0
"""Seconds for its processes to follow it: ranks that have lost their launcher may be importing."""
AN_HOUR = 3600
STEPS = 3
RUN = (
    *("--run.out_dir", "run", "--resume", "auto"),
    *("--run.timeout_seconds", "60", "--run.time_limit_minutes", "60"),
    *("--sampling.max_tokens", "32"),
    *("--evaluation.every", "1", "--evaluation.samples_per_problem", "4"),
    *("--rewards.num_workers", "2", "--rewards.timeout_seconds", "3"),
)
"""Where the run is another than that of kills.py."""


@dataclass(frozen=True)
class Kind:
    """A disturbance: place, call, does and whom are those of once.py."""

    name: str
    codes: tuple[int, ...]
    """Expected exit codes of its attempts."""
    place: str = ""
    """Empty: it comes from outside, by `how`."""
    call: int = 1
    does: str = ""
    whom: str = "worker"
    how: str = "forked"


STOPPED, INTERRUPTED, KILLED = 128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGKILL
A_STEP, AN_EVALUATION = "score train", "score test"
KINDS = (
    Kind("a reward worker is killed while it scores", (0,), A_STEP, 3, "SIGKILL"),
    Kind("what keeps a reward worker is killed", (0,), A_STEP, 7, "SIGKILL", "keeper"),
    Kind("a reward worker is killed at its start", (0,), "start of a worker", 2, "SIGKILL"),
    Kind("an idle reward worker is killed", (0,), "update", 1, "SIGKILL"),
    Kind("a reward worker is killed in an evaluation", (0,), AN_EVALUATION, 20, "SIGKILL"),
    Kind("a reward worker is asked to end, by SIGTERM", (0,), A_STEP, 20, "SIGTERM"),
    Kind("a reward worker is stopped beyond the time-out", (0,), A_STEP, 5, "SIGSTOP"),
    Kind(
        "a reward worker is stopped beyond the time-out in an evaluation", (0,), AN_EVALUATION, 36, "SIGSTOP"
    ),
    Kind("a forked child of the reward function answers", (0,), A_STEP, 4, "fork"),
    Kind("a forked child of the reward function answers in an evaluation", (0,), AN_EVALUATION, 18, "fork"),
    Kind("a reward function leaves by os._exit", (0,), A_STEP, 6, "exit"),
    Kind("a reward function leaves by os._exit in an evaluation", (0,), AN_EVALUATION, 33, "exit"),
    Kind("SIGTERM in the first evaluation", (STOPPED, 0), AN_EVALUATION, 3, "SIGTERM", "launcher"),
    Kind("SIGTERM in a later evaluation", (STOPPED, 0), AN_EVALUATION, 22, "SIGTERM", "launcher"),
    Kind("Ctrl-C in an evaluation", (INTERRUPTED, 0), AN_EVALUATION, 38, "SIGINT", "all"),
    Kind("Ctrl-C in a step", (INTERRUPTED, 0), A_STEP, 20, "SIGINT", "all"),
    Kind("SIGTERM of one rank in a step", (STOPPED, 0), A_STEP, 18, "SIGTERM", "rank"),
    Kind("SIGTERM of one rank in an evaluation", (STOPPED, 0), AN_EVALUATION, 20, "SIGTERM", "rank"),
    Kind("SIGTERM between a step and its evaluation", (STOPPED, 0), "record", 1, "SIGTERM", "launcher"),
    Kind(
        "SIGTERM between an evaluation and the checkpoint",
        (STOPPED, 0),
        "evaluation",
        5,
        "SIGTERM",
        "launcher",
    ),
    Kind(
        "SIGTERM between a checkpoint and the next step", (STOPPED, 0), "manifest", 1, "SIGTERM", "launcher"
    ),
    Kind("SIGTERM while best/ is saved", (STOPPED, 0), "products", 1, "SIGTERM", "launcher"),
    Kind("a rank is killed while best/ is saved", (0,), "products", 1, "SIGKILL", "rank"),
    Kind("a rank is paused while it generates", (0,), "decode", 30, "pause", "rank"),
    Kind("a rank is paused in an update", (0,), "update", 2, "pause", "rank"),
    Kind("SIGTERM while a rank is stopped", (STOPPED, 0), how="stopped rank"),
    Kind("standard output is closed", (0,), how="gone"),
    Kind("the clock is set forward two hours", (0,), how="clock forward"),
    Kind("the clock is set back two hours", (0,), how="clock back"),
    Kind("the launcher is killed while its ranks import", (KILLED, 0), how="killed at import"),
    Kind("SIGTERM while the ranks import", (STOPPED, 0), how="stopped at import"),
)


def train(run_toml: Path, place: str) -> int:
    """Runs `tlt train`, whose ranks are forked, and pass `place` where that is a moment of theirs."""
    fork_ranks()
    if place in MOMENTS:
        before(MOMENTS[place], lambda *_: passes(place))
    return tlt(["train", str(run_toml), *RUN])


def play(workspace: Path, number: int, kind: Kind) -> str:
    """Runs a kind to the end of its last attempt, in a folder of its own. Returns what was wrong; empty:
    nothing."""
    folder = workspace / f"run-{number}"
    marks = folder / "marks"
    marks.mkdir(parents=True)
    plan = {"place": kind.place, "call": kind.call, "does": kind.does, "whom": kind.whom, "marks": str(marks)}
    environ = {
        "PYTHONPATH": os.pathsep.join([str(workspace), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "DISTURB": json.dumps(plan),
    }
    for attempt, code in enumerate(kind.codes):
        how = "forked" if attempt else kind.how
        if wrong := judge(attempt_by(how, folder, environ, kind.place), code):
            return f"attempt {attempt + 1}: {wrong}"
    if kind.place and not (marks / str(kind.call)).exists():
        return "it was never disturbed"
    return difference(folder / "run", workspace / "run-0" / "run")[:1000] if number else ""


def attempt_by(how: str, folder: Path, environ: Mapping[str, str], place: str) -> Ending:
    """Runs the command once, disturbed from outside where that is how."""
    run_toml = folder.parent / "run.toml"
    fresh = functools.partial(
        Command, folder, words=(sys.executable, "-m", "tlt", "train", str(run_toml), *RUN)
    )
    if how.startswith("clock"):
        shift = folder / "shift"
        shift.write_bytes(struct.pack("q", 0))
        seconds = 2 * AN_HOUR if how == "clock forward" else -2 * AN_HOUR
        given = {**environ, "LD_PRELOAD": str(make_clock(folder.parent)), "CLOCK_SHIFT": str(shift)}
        return run(
            fresh(environ=given), LIMIT_SECONDS, PATIENCE, functools.partial(set_clock, folder, seconds)
        )
    if how.endswith("at import"):
        number = signal.SIGKILL if how.startswith("killed") else signal.SIGTERM
        return run(fresh(environ=environ), LIMIT_SECONDS, PATIENCE, SignalAtImport(number))
    stdout = "gone" if how == "gone" else "pipe"
    command = Command(folder, functools.partial(train, run_toml, place), environ=environ, stdout=stdout)
    meanwhile = StopWithStoppedRank(folder) if how == "stopped rank" else None
    return run(command, LIMIT_SECONDS, PATIENCE, meanwhile)


def make_clock(workspace: Path) -> Path:
    """Compiles the clock that can be set."""
    library = workspace / "clock.so"
    if not library.exists():
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return library


def set_clock(folder: Path, seconds: int, process: int) -> None:
    """Sets the clock once a step has been done."""
    metrics = folder / "run" / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        with (folder / "shift").open(
            "r+b"
        ) as file:  # which the run has in its memory: not to be cut off first
            file.write(struct.pack("q", seconds))


class StopWithStoppedRank:
    """Stops a rank once a step has been done, and asks the launcher to stop."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._is_done = folder / "run" / "metrics.jsonl", False

    def __call__(self, launcher: int) -> None:
        if self._is_done or not (self._metrics.exists() and self._metrics.stat().st_size):
            return
        self._is_done = True
        *_, rank = [
            child for child in sorted(children(launcher)) if command_line(child) == command_line(launcher)
        ]
        os.kill(rank, signal.SIGSTOP)
        os.kill(launcher, signal.SIGTERM)


class SignalAtImport:
    """Sends a signal to a launcher when it has had two ranks for a second: they import torch then."""

    def __init__(self, number: signal.Signals) -> None:
        self._number, self._since, self._looked_at = number, 0.0, 0.0

    def __call__(self, launcher: int) -> None:
        now = time.monotonic()
        if self._since == float("inf") or now - self._looked_at < 0.2:
            return
        self._looked_at = now
        ranks = [process for process in descendants(launcher) if "spawn_main" in command_line(process)]
        if len(ranks) >= 2 and not self._since:
            self._since = now
        elif self._since and now - self._since > 1.0:
            os.kill(launcher, self._number)
            self._since = float("inf")


def judge(ending: Ending, code: int) -> str:
    """Returns what was wrong with the end of an attempt; empty: nothing."""
    said = ending.out + ending.err
    if ending.code is None:
        return f"hangs: {said[-500:]!r}"
    if ending.code != code:
        return f"exit code {ending.code} in place of {code}: {said[-500:]!r}"
    if "Traceback" in said:
        return f"a traceback: {said[said.index('Traceback') :][:1500]!r}"
    return f"left behind: {ending.left}" if ending.left else ""


def measure(options: argparse.Namespace) -> int:
    report: dict[str, Any] = {**begin("disturb"), "kinds": []}
    kinds = [*enumerate(KINDS, start=1)]
    if options.only is not None:
        kinds = [kinds[number - 1] for number in options.only]
    adopt_orphans()
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        make_workspace(workspace, STEPS)
        task = PASSING_TASK.replace("share > 0.5", "share > 0.6")  # so that evaluations grow better
        (workspace / "digits.py").write_text(task)
        if wrong := play(workspace, 0, Kind("nothing", (0,))):
            print(f"the run that nobody disturbs: {wrong}")
            return 1
        for number, kind in kinds:
            began = time.monotonic()
            outcome = play(workspace, number, kind) or "same"
            report["kinds"].append(
                {"kind": kind.name, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
            )
            print(number, json.dumps(report["kinds"][-1]), flush=True)
            shutil.rmtree(workspace / f"run-{number}")
            write(options.out, report, text_of(report["kinds"]))
    return int(any(one["outcome"] != "same" for one in report["kinds"]))


def text_of(kinds: Sequence[Mapping[str, Any]]) -> Text:
    same = sum(one["outcome"] == "same" for one in kinds)
    text = (
        f"{len(kinds)} disturbances, each of a run of its own of {STEPS} steps on two ranks, with "
        "evaluations "
        f"before the first step and after each. {same} runs ended, resumed where they were stopped, with the "
        "expected exit code and no process left, and with the policy, metrics, evaluations and best policy "
        "of "
        "the undisturbed run, to the last bit."
    )
    rows = [[one["kind"], one["outcome"].partition(":")[0], one["seconds"]] for one in kinds]
    return "Disturbances", text, ["what", "the run", "s"], rows


def main() -> None:
    parser = make_parser("disturb", __doc__)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of kinds to play alone, from 1 on")
    sys.exit(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
