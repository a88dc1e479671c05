"""TRL's own loop beside TLT (benchmarks/trl.py) has the same turns: its draws are forced to recorded tokens."""

from __future__ import annotations

import torch

from benchmarks.trl_worker import Forced, Response, next_turn


def test_the_next_turn_is_that_of_a_response_with_the_same_beginning() -> None:
    one: Response = ([1, 2], [3, 4, 9, 9, 5, 4], [(2, 4)])
    other: Response = ([1, 2], [3, 4, 8, 8, 6, 4], [(2, 4)])
    left = [one, other]
    assert next_turn([1, 2, 3, 4, 8, 8], left) == [6, 4]
    assert left == [one]
    assert next_turn([1, 2], left) == [3, 4]
    assert next_turn([1, 2], left) == []


def test_one_token_of_each_row_stays_possible_and_the_stop_token_behind_its_end() -> None:
    forced = Forced(2, [[5, 6], [7]], stop_id=0)
    scores_BV = torch.arange(20.0).reshape(2, 10)
    for place, expected in enumerate([(5, 7), (6, 0), (0, 0)]):
        found_BV = forced(torch.zeros(2, 2 + place, dtype=torch.long), scores_BV)
        assert found_BV.isfinite().sum(1).tolist() == [1, 1]
        assert tuple(found_BV.argmax(1).tolist()) == expected
        assert found_BV.max(1).values.tolist() == [
            scores_BV[row, token] for row, token in enumerate(expected)
        ]
