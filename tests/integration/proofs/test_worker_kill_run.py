"""A run of two ranks whose reward workers are killed: it is the run that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.compare import difference
from tests.faults.kills import make_workspace, run_with
from tests.faults.workspace import TASK

KILLED_ONCE = """
import os, signal
from pathlib import Path

class KilledOnce(Digits):
    def score(self, problem, text):
        try:
            (Path(__file__).parent / problem["problem_id"]).unlink()
        except FileNotFoundError:
            return super().score(problem, text)
        os.kill(os.getpid(), signal.SIGKILL)

TASK = KilledOnce()
"""


@pytest.mark.timeout(900)
def test_a_run_whose_reward_workers_are_killed_is_the_one_that_nobody_disturbed(tmp_path: Path) -> None:
    make_workspace(tmp_path, num_steps=1)
    (tmp_path / "digits.py").write_text(TASK + KILLED_ONCE)
    whole = run_with(tmp_path, "whole", [])
    assert whole["outcome"] == "ended", whole["outcome"]
    problems = [tmp_path / f"train-{i}" for i in range(12)]
    for path in problems:
        path.touch()
    killed = run_with(tmp_path, "killed", [])
    assert killed["outcome"] == "ended", killed["outcome"]
    assert sum(not path.exists() for path in problems) == 4, "one response of each of the step's problems"
    assert not difference(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
