"""A batch that is not whole is not trained on."""

from __future__ import annotations

import pytest

from tlt.rollout.result import IncompleteBatch, check_complete

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
