"""The base of tasks whose responses are right (1.0) or wrong (0.0): a subclass adds `problems`, `find` and
`is_right`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, ClassVar, get_args

from tlt.base.io.files import Record
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.tasks.answers import Search, find_answer
from tlt.tasks.numbers import gold_text, to_number
from tlt.tasks.splits import Split, check_split

MAX_DRAWS = 10_000
"""Then the split is taken to have no problem."""


class ExactTask:
    name: ClassVar[str]
    search: ClassVar[Search] = "marked"
    """Where responses have answers (answers.py); a problem's column `search` overrides it."""

    def rng(self, *key: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.name, *key))))

    def number(self, seed: int, split: Split, problems: Iterable[Record]) -> list[Record]:
        return [
            {"problem_id": f"{self.name}-{split}-{seed}-{index}", **problem}
            for index, problem in enumerate(problems)
        ]

    def draw_each(
        self, num: int, seed: int, split: str, draw: Callable[[random.Random, Split], Record]
    ) -> list[Record]:
        """The i-th problem depends on (seed, split, i) alone."""
        chosen = check_split(self.name, split)
        drawn = (draw(self.rng(chosen, seed, index), chosen) for index in range(num))
        return self.number(seed, chosen, drawn)

    def prepare(self, record: Record, options: Mapping[str, Any]) -> Record | None:
        try:
            self.check(record)
        except UserError as error:
            raise UserError(f"task {self.name}: {error}") from None
        return record

    def check(self, problem: Record) -> None:
        """Raises UserError for a problem that cannot be scored."""
        gold_number(problem)
        check_columns(problem)

    def score(self, problem: Record, response_text: str) -> Record:
        answer = self.find(problem, response_text)
        solved = answer is not None and self.is_right(problem, answer)
        return {"reward": float(solved), "solved": solved}

    def find(self, problem: Record, response_text: str) -> str | None:
        """Seeks the answer after any thinking.

        Optional columns: `search`; `thinking_ends`, the tag before the answer ("": none); `in_thought`: the
        response begins within a thought.
        """
        in_thought = bool(problem.get("in_thought"))
        text = after_thinking(response_text, problem.get("thinking_ends"), in_thought)
        return find_answer(text, problem.get("search", self.search))

    def is_right(self, problem: Record, answer: str) -> bool:
        return to_number(answer) == gold_number(problem)


def gold_number(problem: Record) -> Fraction:
    if "answer" not in problem:
        raise UserError(f"no answer among the columns {sorted(problem)}; name the one that holds it answer")
    value = problem["answer"]
    text = gold_text(value)
    number = None if text is None else to_number(text)
    if number is None:
        remedy = "give a number such as 12, -1,234.5 or 3/4, leave the row out, or use the task math"
        raise UserError(f"answer is {shorten(value)}, which is no plain number; {remedy}")
    return number


def check_columns(problem: Record) -> None:
    search, tag = problem.get("search", "marked"), problem.get("thinking_ends", "")
    if search not in get_args(Search):
        raise UserError(f"search is {shorten(search)}; use one of {', '.join(get_args(Search))}")
    if tag is not None and not isinstance(tag, str):
        raise UserError(f"thinking_ends is {shorten(tag)}; give the tag that ends a thought, as text")


def read_weights(place: str, weights: Mapping[Any, float], counts: range) -> dict[int, float]:
    """Keys may be strings, as in TOML."""
    read = {int(count): float(weight) for count, weight in weights.items()}
    if not set(read) <= set(counts) or min(read.values(), default=0) < 0 or sum(read.values()) <= 0:
        raise UserError(
            f"{place} is {read}; give positive weights to counts from {counts[0]} to {counts[-1]}"
        )
    return read


def draw_count(rng: random.Random, weights: Mapping[int, float]) -> int:
    return rng.choices([*weights], [*weights.values()])[0]


def apply(a: int, operator: str, b: int) -> int | None:
    """None: the result is no positive integer."""
    match operator:
        case "+":
            return a + b
        case "*":
            return a * b
        case "-":
            return a - b if a > b else None
    assert operator == "/", operator
    return a // b if a % b == 0 else None
