"""Arithmetic in plain words, for models that read English: asked as a chat message, scored exactly.

    What is 47 + 35? Reply with the number only.                                82
    What is 47 + 35 + 18? Write out each step, then the answer after ####.      47 + 35 = 82 … #### 100
    What is 47 + 35 + 18? Write out each step, again from each next number …    … Again: 35 + 18 = 53 …
    Which is the largest of 47, 35 and 18? Reply with the number only.          47

A problem's split depends on its operation and its numbers. Their order counts only where it matters: 35 + 47
is in the split of 47 + 35.

This file runs in reward workers: it imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlt.base.io.files import Record
from tlt.base.types import UserError
from tlt.tasks.exact import ExactTask
from tlt.tasks.splits import Split, check_split, split_of

OPERATIONS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "+": sum,
    "-": lambda numbers: numbers[0] - sum(numbers[1:]),
    "*": math.prod,
    "max": max,
}
MOST_DIGITS, MOST_TERMS = 12, 32
NUMBER_ONLY = "Reply with the number only."
WITH_STEPS = "Write out each step, then the answer after ####."
CHECKED = (
    "Write out each step, again from each next number until two totals agree, then the answer after ####."
)
ASKED = {False: NUMBER_ONLY, True: WITH_STEPS, "checked": CHECKED}
"""How a response is asked for, by the option `steps`."""
_MAX_REPEATS = 1_000
"""Draws without a new problem, after which there are taken to be no more."""


@dataclass(frozen=True)
class Question:
    """An operation on numbers, from left to right."""

    operation: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        if self.operation == "max":
            *first, last = map(str, self.numbers)
            return f"Which is the largest of {', '.join(first)} and {last}?"
        return f"What is {f' {self.operation} '.join(map(str, self.numbers))}?"

    @property
    def answer(self) -> int:
        return OPERATIONS[self.operation](self.numbers)

    @property
    def num_fixed(self) -> int:
        """Counts the leading numbers whose place counts: the minuend of a difference."""
        return int(self.operation == "-")

    def numbers_from(self, start: int) -> tuple[int, ...]:
        """Returns the numbers rotated by `start` places; a minuend stays in front."""
        fixed, circle = self.numbers[: self.num_fixed], self.numbers[self.num_fixed :]
        first = start % len(circle)
        return (*fixed, *circle[first:], *circle[:first])

    def step(self, total: int, number: int) -> tuple[str, int]:
        """Returns the operation on the total so far and the next number: its text and its result."""
        written = (
            f"max({total}, {number})" if self.operation == "max" else f"{total} {self.operation} {number}"
        )
        return written, Question(self.operation, (total, number)).answer

    @property
    def split(self) -> Split:
        """The split, a function of the operation and its numbers; only a minuend's place counts."""
        fixed, others = self.numbers[: self.num_fixed], self.numbers[self.num_fixed :]
        return split_of(str((self.operation, *fixed, *sorted(others))))


@dataclass(frozen=True)
class Difficulty:
    """The operations and ranges, (fewest, most), that questions are drawn from."""

    operations: tuple[str, ...]
    digits: tuple[int, int]
    """Digits of each number."""
    terms: tuple[int, int]
    """Numbers in a question."""

    @staticmethod
    def of(operations: Sequence[str], digits: int | Sequence[int], terms: int | Sequence[int]) -> Difficulty:
        """Reads the options of these names. Raises UserError for what cannot be drawn."""
        chosen = (operations,) if isinstance(operations, str) else tuple(operations)
        if not chosen or not set(chosen) <= set(OPERATIONS):
            raise UserError(
                f"task arithmetic: operations is {operations!r}; give some of {', '.join(OPERATIONS)}"
            )
        return Difficulty(
            chosen, _range("digits", digits, 1, MOST_DIGITS), _range("terms", terms, 2, MOST_TERMS)
        )

    def draw(self, rng: random.Random) -> Question:
        """Draws operation, count and each number's length evenly, then the number among those of that
        length."""
        operation = rng.choice(self.operations)
        return Question(operation, tuple(self._draw_number(rng) for _ in range(rng.randint(*self.terms))))

    def _draw_number(self, rng: random.Random) -> int:
        digits = rng.randint(*self.digits)
        return rng.randint(10 ** (digits - 1), 10**digits - 1)


def draw_questions(rng: random.Random, num: int, split: Split, difficulty: Difficulty) -> list[Question]:
    """Draws `num` different questions of the split. Raises UserError where the options leave fewer."""
    questions: dict[Question, None] = {}  # in the order of their drawing
    tries = 0
    while len(questions) < num:
        question = difficulty.draw(rng)
        tries += 1
        if question.split == split and question not in questions:
            questions[question] = None
            tries = 0
        if tries == _MAX_REPEATS:
            raise UserError(
                f"task arithmetic: its options leave about {len(questions)} different {split} problems of "
                f"the {num} asked for; ask for fewer, or raise digits or terms"
            )
    return list(questions)


def ask(question: Question, instruction: str) -> list[dict[str, str]]:
    """Returns the chat that asks a question."""
    return [{"role": "user", "content": f"{question} {instruction}".strip()}]


class Arithmetic(ExactTask):
    """The task (see `tlt.tasks.base.Task`)."""

    name = "arithmetic"

    def problems(
        self,
        num: int,
        seed: int,
        *,
        split: str = "train",
        operations: Sequence[str] = ("+",),
        digits: int | Sequence[int] = 2,
        terms: int | Sequence[int] = 2,
        steps: bool | str = False,
        instruction: str | None = None,
    ) -> list[Record]:
        """Returns different problems, as chat messages; a larger `num` adds problems after the same ones.

        operations    drawn from evenly: "+", "-", "*", or "max" for the largest number; one a problem
        digits        of each number: a count, or [fewest, most]
        terms         numbers in a problem: a count, or [fewest, most]
        steps         true asks for the steps and for an answer marked by `####` or a box; false takes the
                      response's last number; "checked" asks for steps until two totals agree
        instruction   what follows the question, instead of the text for `steps`
        """
        checked = check_split(self.name, split)
        difficulty = Difficulty.of(operations, digits, terms)
        if steps not in ASKED:
            raise UserError(f'task arithmetic: steps is {steps!r}; give true, false or "checked"')
        asked = instruction if instruction is not None else ASKED[steps]
        search = "marked" if steps else "any"
        questions = draw_questions(self.rng(split, seed), num, checked, difficulty)
        return self.number(
            seed,
            checked,
            ({"messages": ask(q, asked), "answer": str(q.answer), "search": search} for q in questions),
        )


def _range(name: str, value: int | Sequence[int], least: int, most: int) -> tuple[int, int]:
    """Returns (fewest, most) of an option that is a count or both."""
    bounds = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if (
        len(bounds) != 2
        or any(type(bound) is not int for bound in bounds)
        or not least <= bounds[0] <= bounds[1] <= most
    ):
        raise UserError(
            f"task arithmetic: {name} is {value!r}; give a count from {least} to {most}, or [fewest, most]"
        )
    return bounds[0], bounds[1]


TASK = Arithmetic()
