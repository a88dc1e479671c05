"""Arithmetic written out: running totals, once more from the next number, and so on until two of the totals
agree.

    47 + 35 = 82           from left to right
    82 + 18 = 110          here a mistake
    Again:                 the same numbers, from the second one on; so other sums, whose mistakes are others
    35 + 18 = 53
    53 + 47 = 100
    Again:                 the totals differ, so once more, from the third one on
    18 + 47 = 65
    65 + 35 = 100
    #### 100

What a model reads in a warm-up, before RL. Some results may be wrong on purpose, so that it sees what
follows a mistake; a piece of text says of itself whether it is to be learned. Knows neither models nor
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.tasks.arithmetic import Question

MOST_ATTEMPTS = 5
"""The last two of them have no mistake."""


@dataclass(frozen=True)
class Piece:
    """A part of a solution's text. is_learned: false for a result that is wrong."""

    text: str
    is_learned: bool = True


def write_solution(
    question: Question, *, is_checked: bool, mistakes: float = 0.0, rng: random.Random
) -> list[Piece]:
    """Returns the solution of a question, piece by piece; the answer that it gives at its end is right.

    is_checked: whether it begins again until two totals agree.
    mistakes: share of the results that are wrong, if it does.
    """
    pieces: list[Piece] = []
    totals: list[int] = []
    is_done = False
    while not is_done:
        is_free = is_checked and len(totals) < MOST_ATTEMPTS - 2  # to have mistakes
        numbers = question.numbers_from(len(totals))
        total = _add_steps(pieces, question, numbers, mistakes if is_free else 0.0, rng)
        is_done = total in totals or not is_checked
        totals.append(total)
        pieces.append(Piece(f"#### {question.answer}" if is_done else "Again:\n"))
    if total != question.answer:  # two mistakes that agree: nobody would notice them
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
    """Returns another number: one digit is off by a little, as when a carry is forgotten."""
    digit: int = 10 ** rng.randrange(len(str(abs(result))))
    return result + rng.choice((-2, -1, 1, 2)) * digit
