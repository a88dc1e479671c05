"""Arithmetic written out: running totals, again from each next number until two totals agree.

    47 + 35 = 82           from left to right
    82 + 18 = 110          here a mistake
    Again:                 the same numbers, from the second one on
    35 + 18 = 53
    53 + 47 = 100
    Again:                 the totals differ, so once more, from the third one on
    18 + 47 = 65
    65 + 35 = 100
    #### 100

A model reads such solutions in a warm-up, before RL. Some results may be wrong on purpose, to show what
follows a mistake; each piece of the text says whether the model learns to write it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.tasks.arithmetic import Question

MOST_ATTEMPTS = 5
"""Attempts of a solution at most; the last two have no mistake."""


@dataclass(frozen=True)
class Piece:
    """A part of a solution's text."""

    text: str
    is_learned: bool = True
    """False for a result that is wrong."""


def write_solution(
    question: Question, *, is_checked: bool, mistakes: float = 0.0, rng: random.Random
) -> list[Piece]:
    """Returns the solution of a question, piece by piece; its final answer is right.

    is_checked: whether it begins again until two totals agree.
    mistakes: share of the results that are wrong; only where is_checked.
    """
    pieces: list[Piece] = []
    totals: list[int] = []
    is_done = False
    while not is_done:
        may_err = is_checked and len(totals) < MOST_ATTEMPTS - 2
        numbers = question.numbers_from(len(totals))
        total = _add_steps(pieces, question, numbers, mistakes if may_err else 0.0, rng)
        is_done = total in totals or not is_checked
        totals.append(total)
        pieces.append(Piece(f"#### {question.answer}" if is_done else "Again:\n"))
    if total != question.answer:  # two mistakes that agree
        return write_solution(question, is_checked=is_checked, mistakes=mistakes, rng=rng)
    return pieces


def _add_steps(
    pieces: list[Piece], question: Question, numbers: Sequence[int], mistakes: float, rng: random.Random
) -> int:
    """Appends a line for each operation on the total so far, and returns the last total."""
    total = numbers[0]
    for number in numbers[1:]:
        line, result = question.step(total, number)
        is_wrong = rng.random() < mistakes
        total = _misread(result, rng) if is_wrong else result
        pieces += [Piece(f"{line} = "), Piece(str(total), not is_wrong), Piece("\n")]
    return total


def _misread(result: int, rng: random.Random) -> int:
    """Returns the number with one digit off by 1 or 2, as when a carry is forgotten."""
    digit: int = 10 ** rng.randrange(len(str(abs(result))))
    return result + rng.choice((-2, -1, 1, 2)) * digit
