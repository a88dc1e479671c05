"""Arithmetic in plain words, for models that read English: asked as a chat message, scored exactly. Knows
text, not models.

    What is 47 + 35? Reply with the number only.                                   82
    What is 47 + 35 + 18? Write out each step, then the answer after ####.         47 + 35 = 82 … #### 100
    What is 47 + 35 + 18? Write out each step, again from each next number …       … Again: 35 + 18 = 53 … #### 100
    Which is the largest of 47, 35 and 18? Reply with the number only.             47

Whether a problem is for training or for testing depends on its operation and its numbers. Their order counts
only where it
matters: 35 + 47 is in the split of 47 + 35.

This file runs in reward workers: it imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.tasks.answers import after_thinking, find_answer, to_number
from tlt.tasks.splits import Split, check_split, split_of
from tlt.types import UserError

OPERATIONS = ("+", "-", "*", "max")
MOST_DIGITS, MOST_TERMS = 12, 32
NUMBER_ONLY = "Reply with the number only."
WITH_STEPS = "Write out each step, then the answer after ####."
CHECKED = (
    "Write out each step, again from each next number until two totals agree, then the answer after ####."
)
ASKED = {False: NUMBER_ONLY, True: WITH_STEPS, "checked": CHECKED}
"""How a response is asked for, by the option `steps`."""
MAX_TRIES = 1_000
"""Draws without a new problem, after which there are taken to be no more."""
THINKING_ENDS = "</think>"


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
        first, *rest = self.numbers
        match self.operation:
            case "+":
                return sum(self.numbers)
            case "-":
                return first - sum(rest)
            case "*":
                return math.prod(self.numbers)
            case "max":
                return max(self.numbers)
        raise ValueError(f"operation {self.operation!r} is none of {OPERATIONS}")

    def numbers_from(self, start: int) -> tuple[int, ...]:
        """The numbers from the one at `start` on, then those before it, in a circle; what is subtracted
        from stays in front."""
        kept = 1 if self.operation == "-" else 0
        circle = self.numbers[kept:]
        first = start % len(circle)
        return (*self.numbers[:kept], *circle[first:], *circle[:first])

    def step(self, total: int, number: int) -> tuple[str, int]:
        """Returns how the operation on the total so far and the next number is written, and its result."""
        written = (
            f"max({total}, {number})" if self.operation == "max" else f"{total} {self.operation} {number}"
        )
        return written, Question(self.operation, (total, number)).answer

    @property
    def split(self) -> Split:
        """A function of what is computed alone: the minuend of a difference counts, no other order does."""
        fixed = 1 if self.operation == "-" else 0
        return split_of(str((self.operation, *self.numbers[:fixed], *sorted(self.numbers[fixed:]))))


@dataclass(frozen=True)
class Difficulty:
    """Which operations, on how many numbers of how many digits. The ranges are (fewest, most)."""

    operations: tuple[str, ...]
    digits: tuple[int, int]
    terms: tuple[int, int]

    @staticmethod
    def of(operations: Sequence[str], digits: int | Sequence[int], terms: int | Sequence[int]) -> Difficulty:
        """Reads the options of these names. Raises UserError for what cannot be drawn."""
        counts = _range("digits", digits, 1, MOST_DIGITS), _range("terms", terms, 2, MOST_TERMS)
        return Difficulty(_check_operations(operations), *counts)

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
        if tries == MAX_TRIES:
            raise UserError(
                f"task arithmetic: its options leave about {len(questions)} different {split} problems of "
                f"the {num} asked for;"
                " ask for fewer, or raise digits or terms"
            )
    return list(questions)


def ask(question: Question, instruction: str) -> list[dict[str, str]]:
    """Returns the chat that asks a question."""
    return [{"role": "user", "content": f"{question} {instruction}".strip()}]


@dataclass(frozen=True)
class Arithmetic:
    """The task `arithmetic` (see `tlt.tasks.base.Task`)."""

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
    ) -> list[dict[str, Any]]:
        """Returns different problems, as chat messages; more of them begin with the same ones.

        operations    drawn from evenly: "+", "-", "*", or "max" for the largest number; one holds for all terms of a problem
        digits        of each number: a count, or [fewest, most]
        terms         numbers in a problem: a count, or [fewest, most]
        steps         whether the response is to write its steps out and mark its answer, by `####` or a box; else its last
                      number counts. "checked" asks it to begin again until two totals agree
        instruction   what follows the question, instead of words for `steps`
        """
        checked = check_split("arithmetic", split)
        difficulty = Difficulty.of(operations, digits, terms)
        if steps not in ASKED:
            raise UserError(f'task arithmetic: steps is {steps!r}; give true, false or "checked"')
        asked = instruction if instruction is not None else ASKED[steps]
        rng = random.Random(f"arithmetic {split} {seed}")
        return [
            {
                "problem_id": f"arithmetic-{split}-{seed}-{index}",
                "messages": ask(question, asked),
                "answer": str(question.answer),
                "search": "marked" if steps else "any",
            }
            for index, question in enumerate(draw_questions(rng, num, checked, difficulty))
        ]

    def score(self, problem: Mapping[str, Any], response_text: str) -> dict[str, Any]:
        """Rewards 1.0 when the response's answer, sought after any thinking, is the problem's, else 0.0.
        The problem's `search` says where the answer stands (tlt/tasks/answers.py)."""
        answer = find_answer(after_thinking(response_text, THINKING_ENDS), problem["search"])
        solved = answer is not None and to_number(answer) == to_number(problem["answer"])
        return {"reward": float(solved), "solved": solved}


def _check_operations(operations: Sequence[str]) -> tuple[str, ...]:
    chosen = (operations,) if isinstance(operations, str) else tuple(operations)
    if not chosen or not set(chosen) <= set(OPERATIONS):
        raise UserError(
            f"task arithmetic: operations is {operations!r}; give some of {', '.join(OPERATIONS)}"
        )
    return chosen


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
