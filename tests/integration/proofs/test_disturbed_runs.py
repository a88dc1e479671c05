"""A seeded few of what tests/faults does to runs: odd input, folders and user code, of which each
ends well or in one line and leaves nothing behind; and disturbances, after which a run is the one that
nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disturb import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
DISTURBANCES = (
    "an idle reward worker is killed",
    "a reward worker is stopped beyond the time-out in an evaluation",
    "a forked child of the reward function answers",
    "Ctrl-C in an evaluation",
    "SIGTERM of one rank in a step",
    "SIGTERM between a step and its evaluation",
    "standard output is closed",
)
NUM_CASES = 60
"""Some of each kind."""


def play(*words: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1700
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_disturbed_runs_are_the_one_that_nobody_disturbed() -> None:
    numbers = [number for number, kind in enumerate(KINDS, start=1) if kind.name in DISTURBANCES]
    assert len(numbers) == len(DISTURBANCES)
    play("tests.faults.disturb", "--only", *map(str, numbers))


def test_odd_surroundings_folders_and_user_code_end_a_run_well_or_in_one_line_and_leave_nothing_behind() -> (
    None
):
    play("tests.faults.fuzz", "--num", str(NUM_CASES), "--seed", "1", "--processes", "1")
