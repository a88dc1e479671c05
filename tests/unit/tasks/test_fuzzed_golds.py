"""Golds and answers with known verdicts, through the tasks that compare numbers: a slice of what
tests/integration/proofs/test_golds.py tries."""

from __future__ import annotations

import pytest

from tests.golds import SUMS, wrong_verdicts


@pytest.mark.parametrize("task", [SUMS, "math"])
def test_the_verdict_is_that_of_the_exact_numbers(task: str) -> None:
    if task == "math":
        pytest.importorskip("math_verify")
    assert wrong_verdicts(task, 150, seed=1) == []
