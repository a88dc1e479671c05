"""Written-out arithmetic: every line is right but those that are marked as mistakes, and the answer is scored 1.0."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from tlt.tasks.arithmetic import CHECKED, OPERATIONS, TASK, WITH_STEPS, Difficulty
from tlt.tasks.worked import Piece, write_solution
from tlt.types import UserError

MIXED = Difficulty.of(OPERATIONS, [1, 3], [2, 6])


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


def test_totals_that_differ_are_followed_by_another_attempt_and_equal_ones_by_the_answer() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        question = MIXED.draw(rng)
        written = text(write_solution(question, is_checked=True, mistakes=0.2, rng=rng))
        attempts = written.split("Again:\n")
        seen.add(len(attempts))
        for number, attempt in enumerate(attempts, start=1):
            totals = [re.findall(r"= (-?\d+)\n", half)[-1] for half in attempt.split("Check:\n")]
            is_last = number == len(attempts)
            assert (totals[0] == totals[1]) == is_last
            if is_last:
                assert attempt.endswith(f"\n#### {totals[0]}")
    assert seen == {1, 2, 3}


def test_the_check_reads_the_numbers_in_reverse_order_and_leaves_what_is_subtracted_from_in_front() -> None:
    rng = random.Random(0)
    sums, differences = (Difficulty.of([operation], 2, 3).draw(rng) for operation in "+-")
    for question, order in ((sums, sums.numbers[::-1]), (differences, (differences.numbers[i] for i in (0, 2, 1)))):
        first, second, third = order
        sign = question.operation
        checked = text(write_solution(question, is_checked=True, rng=rng)).split("Check:\n")[1]
        half = first + second if sign == "+" else first - second
        assert checked == f"{first} {sign} {second} = {half}\n{half} {sign} {third} = {question.answer}\n#### {question.answer}"


def test_steps_says_how_a_response_is_asked_for() -> None:
    asked = {steps: TASK.problems(1, 0, steps=steps)[0] for steps in (True, "checked")}
    assert asked[True]["messages"][0]["content"].endswith(WITH_STEPS)
    assert asked["checked"]["messages"][0]["content"].endswith(CHECKED)
    assert asked["checked"]["search"] == "marked"
    with pytest.raises(UserError, match="steps is 'twice'; give true, false or \"checked\""):
        TASK.problems(1, 0, steps="twice")
