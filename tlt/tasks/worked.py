"""Arithmetic written out: running totals, a check in the reverse order, and another attempt where the two differ.

    47 + 35 = 82           from left to right
    82 + 18 = 110          here a mistake
    Check:                 the same numbers, the last one first
    18 + 35 = 53
    53 + 47 = 100
    Again:                 the totals differ, so both are written once more
    …
    #### 100

What a model reads in a warm-up, before RL. Some results may be wrong on purpose, so that it sees what follows a mistake; a
piece of text says of itself whether it is to be learned. Knows neither models nor tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.tasks.arithmetic import Question

MOST_ATTEMPTS = 3
"""The last of them has no mistake."""


@dataclass(frozen=True)
class Piece:
    """A part of a solution's text. is_learned: false for a result that is wrong."""

    text: str
    is_learned: bool = True


def write_solution(question: Question, *, is_checked: bool, mistakes: float = 0.0, rng: random.Random) -> list[Piece]:
    """Returns the solution of a question, piece by piece; the answer that it gives at its end is right.

    is_checked: whether it checks its total.  mistakes: share of the results that are wrong at first, where it checks.
    """
    pieces: list[Piece] = []
    for attempt in range(MOST_ATTEMPTS):
        share = mistakes if is_checked and attempt < MOST_ATTEMPTS - 1 else 0.0
        total = _add_steps(pieces, question, question.numbers, share, rng)
        if not is_checked:
            break
        pieces.append(Piece("Check:\n"))
        checked = _add_steps(pieces, question, question.reversed_numbers, share, rng)
        if total == checked == question.answer:
            break
        if total == checked:  # two mistakes that agree: nobody would notice them
            return write_solution(question, is_checked=is_checked, mistakes=mistakes, rng=rng)
        pieces.append(Piece("Again:\n"))
    return [*pieces, Piece(f"#### {question.answer}")]


def _add_steps(pieces: list[Piece], question: Question, numbers: Sequence[int], mistakes: float, rng: random.Random) -> int:
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
