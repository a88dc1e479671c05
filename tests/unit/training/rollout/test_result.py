"""A batch that is not whole is not trained on."""

from __future__ import annotations

import math

import pytest

from tlt.base.records import DrafterReport
from tlt.base.types import Reward, Rollout
from tlt.engine.stats import EngineStats
from tlt.training.rollout.result import IncompleteBatch, PhaseResult, ReplicaReport, check_complete

A, B, C, Z = ("a", 0), ("a", 1), ("b", 0), ("z", 0)
ONE_B = r"such as \('a', 1\)"


def test_what_was_asked_for_may_come_from_any_rank_in_any_order() -> None:
    check_complete([A, B, C], [([C], [C]), ([], []), ([B, A], [A, B])], "rollout 3")


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        (
            [([A], [A]), ([C], [C])],
            rf"1 of 3 requests have no response, {ONE_B} \(responses: 1 by rank 0, 1 by",
        ),
        ([([A, B], [A]), ([C], [C])], f"1 of 3 requests have no reward, {ONE_B}"),
        ([([A, B], [A, B]), ([B, C], [B, C])], f"1 of 3 requests were answered too often, {ONE_B}"),
        ([([A, B, C, Z], [A, B, C])], r"1 of 3 requests were answered too often, such as \('z', 0\)"),
        ([([], [])], "3 of 3 requests have no response"),
    ],
)
def test_anything_else_is_refused_with_its_phase_the_first_response_and_the_ranks(
    brought: list, message: str
) -> None:
    with pytest.raises(IncompleteBatch, match=f"^rollout 3: {message}"):
        check_complete([A, B, C], brought, "rollout 3")


@pytest.mark.parametrize(("recalled", "rate"), [(0, 6.0), (1, math.nan), (11, math.nan), (12, math.nan)])
def test_a_phase_that_read_tokens_of_the_journal_has_no_rate(recalled: int, rate: float) -> None:
    rollouts = [Rollout("a", i, (1,), (2,) * 6, (0.0,) * 6, "stop", 0) for i in range(2)]
    replica = ReplicaReport(0.0, 1.5, 2.0, EngineStats(), DrafterReport())
    phase = PhaseResult(rollouts, [Reward(1.0, True)] * 2, [replica], recalled_tokens=recalled)
    found = phase.rollout_record().tokens_per_second
    assert found == pytest.approx(rate, nan_ok=True)
