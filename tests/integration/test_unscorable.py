"""A task whose score fails: a run without any score ends at once, one that misses some goes on and counts
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tests.integration.test_run import PATIENCE
from tlt.training.report.record import read_metrics
from tlt.training.saved.run_folder import refuse_begun

pytestmark = pytest.mark.timeout(2 * PATIENCE)
TASK = """
from digits import Digits
class Partly(Digits):
    def __init__(self, fails):
        self.fails = fails
    def score(self, problem, text):
        if self.fails(problem):
            raise KeyError('target')
        return super().score(problem, text)
NEVER = Partly(lambda problem: True)
SOMETIMES = Partly(lambda problem: problem['problem_id'].endswith(('0', '4', '8')))
"""


def words_for(workspace: Path, task: str) -> list[str]:
    (workspace / "partly.py").write_text(TASK)
    words = [
        "train",
        str(workspace / "run.toml"),
        "--run.out_dir",
        str(workspace / task),
        "--task.name",
        task,
    ]
    few = (
        "--run.num_steps",
        "2",
        "--run.num_ranks",
        "1",
        "--evaluation.num_problems",
        "0",
        "--rollout.speculation",
        "off",
    )
    return [*words, *few]


def test_a_task_that_never_scores_ends_the_run_with_one_line(
    workspace: Path, tlt_here: Tlt, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever processes write, those that score too."""
    code, said = tlt_here(*words_for(workspace, "partly:NEVER")), capfd.readouterr()
    assert code == 2, said.out + said.err
    message = said.err.strip().splitlines()[-1]
    assert message.startswith(
        "tlt: error: task partly:NEVER: none of the 16 responses of step 1 could be scored"
    )
    assert "KeyError: 'target'" in message
    assert "Traceback" not in said.err
    refuse_begun(
        workspace / "partly:NEVER"
    )  # nothing is there to keep: the corrected task may have the folder


def test_responses_that_could_not_be_scored_are_counted_and_left_out_of_the_means(
    workspace: Path, tlt_here: Tlt
) -> None:
    assert tlt_here(*words_for(workspace, "partly:SOMETIMES")) == 0
    lines = read_metrics(workspace / "partly:SOMETIMES" / "metrics.jsonl")
    assert sum(line.rewards.num_errors for line in lines) > 0
    for line in lines:
        assert line.rewards.num_errors % 4 == 0, "whole groups"
        place = f"KeyError: 'target', {workspace / 'partly.py'}:8"
        assert line.rewards.first_error == (place if line.rewards.num_errors else "")
