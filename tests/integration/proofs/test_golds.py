"""Two thousand golds and answers with known verdicts, through every judge of numbers: no wrong verdict."""

from __future__ import annotations

import pytest

from tests.golds import SUMS, wrong_verdicts

NUM = 2000


@pytest.mark.parametrize("task", [SUMS, "math"])
def test_no_verdict_of_a_task_differs_from_that_of_the_exact_numbers(task: str) -> None:
    if task == "math":
        pytest.importorskip("math_verify")
    assert wrong_verdicts(task, NUM, seed=0) == []
