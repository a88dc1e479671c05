"""Written-out arithmetic: every line is right but those that are marked as mistakes, and the answer is
scored 1.0."""

from __future__ import annotations

import itertools
import random

import pytest

from recipes.smollm2.arithmetic import OPERATIONS, TASK, Difficulty
from recipes.smollm2.warm_up import Piece, write_solution

MIXED = Difficulty.of([*OPERATIONS], [1, 3], [2, 6])


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("mistakes", [0.0, 0.2])
def test_a_solution_is_scored_as_solved(is_checked: bool, mistakes: float) -> None:
    rng = random.Random(1)
    for _ in range(200):
        question = MIXED.draw(rng)
        written = text(write_solution(question, is_checked=is_checked, mistakes=mistakes, rng=rng))
        problem = {"answer": str(question.answer), "search": "marked"}
        assert TASK.score(problem, written)["reward"] == 1.0, written
        assert TASK.score({**problem, "answer": str(question.answer + 1)}, written)["reward"] == 0.0


def test_what_is_learned_is_right_and_mistakes_are_what_is_not() -> None:
    rng = random.Random(2)
    num_wrong = 0
    for _ in range(300):
        pieces = write_solution(MIXED.draw(rng), is_checked=True, mistakes=0.2, rng=rng)
        for line, result in itertools.pairwise(pieces):
            if line.text.endswith(" = "):
                is_right = eval(line.text.removesuffix(" = ")) == int(result.text)
                assert result.is_learned == is_right
                num_wrong += not is_right
    assert num_wrong > 100
