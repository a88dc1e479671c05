r"""Arithmetic word problems: drawn, told in English and solved by templates, scored exactly.

    chain      12+7-4                                      a number, then one to four operations
    problem    Mia has 12 apples. Ben gives her 7 more. …  the chain told as a story
    worked     12+7=19. 19-4=15. The answer is \boxed{15}.
    terse      The answer is \boxed{15}.

A chain belongs to the train or to the test split whatever story tells it: no arithmetic of a test problem
occurs in training under other names. Results are positive integers and division is exact.

This file runs in reward workers: it imports neither torch nor transformers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt.base.io.files import Record
from tlt.base.types import UserError
from tlt.tasks.exact import MAX_DRAWS, ExactTask, apply, draw_count, read_weights
from tlt.tasks.splits import Split, split_of

MAX_STEPS = 4
MAX_FACTOR = 9
"""The largest number that is multiplied or divided by."""
DEFAULT_STEPS: Mapping[int, float] = {1: 0.1, 2: 0.5, 3: 0.4}
"""Default weights of problems with 1, 2 and 3 operations."""


@dataclass(frozen=True)
class ChainLimits:
    """Limits of a problem's arithmetic."""

    steps: Mapping[int, float]
    """Number of operations → weight."""
    max_number: int
    """The largest number that a problem gives."""
    max_result: int
    """The largest result, intermediate ones included."""

    def __post_init__(self) -> None:
        if self.max_number < 4 or self.max_result < self.max_number:
            raise UserError(
                f"task word-problems: max_number is {self.max_number}, max_result {self.max_result};"
                " the first must be at least 4, the second no smaller than the first"
            )


@dataclass(frozen=True)
class Chain:
    """A number and the operations applied to it, from left to right."""

    start: int
    steps: tuple[tuple[str, int], ...]
    """(operator, operand): operators are + - * /."""

    def __str__(self) -> str:
        return str(self.start) + "".join(f"{operator}{operand}" for operator, operand in self.steps)

    @property
    def split(self) -> Split:
        return split_of(str(self))

    @property
    def equations(self) -> list[str]:
        """The operations written out: `12+7=19`, `19-4=15`."""
        values = self.values
        return [f"{values[i]}{op}{operand}={values[i + 1]}" for i, (op, operand) in enumerate(self.steps)]

    @property
    def values(self) -> list[int]:
        """The start and every result; the last one is the answer."""
        values = [self.start]
        for operator, operand in self.steps:
            values.append(_result(values[-1], operator, operand))
        return values


def _result(a: int, operator: str, b: int) -> int:
    result = apply(a, operator, b)
    assert result is not None, f"{a}{operator}{b} is no positive integer"
    return result


# ------------------------------------------------------------------------------------------------------------
# Arithmetic


def draw_chain(rng: random.Random, split: Split, limits: ChainLimits) -> Chain:
    """Draws a chain of the split: the number of operations, then each of them within the limits."""
    count = draw_count(rng, limits.steps)
    for _ in range(MAX_DRAWS):
        start = value = rng.randint(2, limits.max_number)
        steps: list[tuple[str, int]] = []
        while len(steps) < count and (possible := _possible_steps(value, limits)):
            operator = rng.choice(list(possible))
            steps.append((operator, rng.choice(possible[operator])))
            value = _result(value, *steps[-1])
        chain = Chain(start, tuple(steps))
        if len(steps) == count and chain.split == split:
            return chain
    raise UserError(
        f"task word-problems: no {split} problem of {count} operations within max_number {limits.max_number} "
        f"and max_result {limits.max_result}; raise the limits"
    )


def _possible_steps(value: int, limits: ChainLimits) -> dict[str, Sequence[int]]:
    """Returns the operands that each operator may have after `value`; operators without any are left out."""
    largest, factors = limits.max_number, range(2, min(MAX_FACTOR, limits.max_number) + 1)
    operands: dict[str, Sequence[int]] = {
        "+": range(2, min(largest, limits.max_result - value) + 1),
        "-": range(2, min(largest, value - 1) + 1),
        "*": [factor for factor in factors if value * factor <= limits.max_result],
        "/": [factor for factor in factors if value % factor == 0 and value > factor],
    }
    return {operator: numbers for operator, numbers in operands.items() if numbers}


# ------------------------------------------------------------------------------------------------------------
# English

WOMEN = ("Mia", "Anna", "Zoe", "Lena", "Rosa", "Emma", "Nora", "Ines", "Ada", "Tess", "Ruth", "Olga")
MEN = ("Ben", "Tom", "Max", "Leo", "Paul", "Omar", "Hugo", "Jan", "Sam", "Karl", "Ivan", "Noah")
THINGS = (
    "apples", "pears", "books", "stamps", "coins", "marbles", "shells", "cards", "pencils", "flowers",
    "cookies", "buttons", "stones", "balloons", "tickets", "beads", "eggs", "candles", "stickers", "nuts",
)  # fmt: skip
PACKS = ("boxes", "bags", "baskets", "trays")
PLACES = ("basket", "box", "bag", "drawer")

OPENINGS = (
    "{name} has {a} {things}.",
    "{name} starts the day with {a} {things}.",
    "There are {a} {things} in {name}'s {place}.",
)
FIRST_STEPS: Mapping[str, tuple[str, ...]] = {
    "+": (
        "{other} has {a} {things}, and {name} has {n} more than that.",
        "{name} finds {a} {things} on Monday and {n} on Tuesday.",
    ),
    "-": ("{other} has {a} {things}, and {name} has {n} fewer than that.",),
    "*": ("{name} has {a} {packs} with {n} {things} in each.", "{name} buys {n} {packs} of {a} {things}."),
    "/": ("{other} shares {a} {things} equally among {n} people, and {name} is one of them.",),
}
"""Openings that tell the first operation, too."""
STEPS: Mapping[str, tuple[str, ...]] = {
    "+": (
        "{other} gives {her} {n} more.",
        "{she} buys {n} more {things}.",
        "then {she} finds {n} {things} on the way home.",
        "{she} gets {n} more from {other}.",
    ),
    "-": (
        "{she} gives {n} of them to {other}.",
        "{she} loses {n} {things}.",
        "then {she} sells {n} {things}.",
        "{other} takes {n} of them.",
    ),
    "*": (
        "{she} works hard and soon has {n} times as many.",
        "by the end of the week {she} has {n} times as many {things}.",
    ),
    "/": (
        "{she} sorts them into {n} equal piles and keeps only one pile.",
        "{she} shares them equally among {n} people and keeps one share.",
    ),
}
STEPS_OF_TWO: Mapping[str, tuple[str, ...]] = {
    "*": ("{she} soon has twice as many.", "then the number of {things} doubles."),
    "/": ("{she} gives half of them to {other}.", "then {she} loses half of the {things}."),
}
"""Steps whose operand 2 stands in words."""
CLOSINGS = (
    "How many {things} does {name} have now?",
    "How many {things} does {name} have in the end?",
    "{name} counts the {things}. How many are there?",
)


def tell_story(chain: Chain, rng: random.Random) -> str:
    """Returns the chain as a story that ends in a question."""
    is_woman = rng.random() < 0.5
    people, others = (WOMEN, MEN) if is_woman else (MEN, WOMEN)  # so that a pronoun means one person
    words = {
        "name": rng.choice(people),
        "she": "she" if is_woman else "he",
        "her": "her" if is_woman else "him",
        "things": rng.choice(THINGS),
        "packs": rng.choice(PACKS),
        "place": rng.choice(PLACES),
    }
    sentences: list[str] = []

    def say(templates: tuple[str, ...], operand: int = 0) -> None:
        text = rng.choice(templates).format_map(
            {**words, "a": chain.start, "n": operand, "other": rng.choice(others)}
        )
        sentences.append(text[0].upper() + text[1:])

    steps = list(chain.steps)
    if rng.random() < 0.5:
        operator, operand = steps.pop(0)
        say(FIRST_STEPS[operator], operand)
    else:
        say(OPENINGS)
    for operator, operand in steps:
        in_words = STEPS_OF_TWO.get(operator, ()) if operand == 2 else ()
        say(in_words if in_words and rng.random() < 0.5 else STEPS[operator], operand)
    say(CLOSINGS)
    return " ".join(sentences)


def solve(chain: Chain, is_worked: bool) -> str:
    """Returns a solution: the answer after every operation written out, or alone."""
    work = [f"{equation}." for equation in chain.equations] if is_worked else []
    return " ".join([*work, rf"The answer is \boxed{{{chain.values[-1]}}}."])


# ------------------------------------------------------------------------------------------------------------
# The task


class WordProblems(ExactTask):
    """The task (see `tlt.tasks.base.Task`)."""

    name = "word-problems"
    search = "boxed"

    def problems(
        self,
        num: int,
        seed: int,
        *,
        split: str = "train",
        steps: Mapping[int, float] | Mapping[str, float] | None = None,
        max_number: int = 30,
        max_result: int = 99,
        chat: bool = True,
    ) -> list[Record]:
        """Returns problems; the i-th depends on (seed, i) and the options only.

        steps        number of operations → weight; keys may be strings (TOML)
        max_number   given numbers are 2..max_number; numbers multiplied or divided by are at most 9
        max_result   results, intermediate ones included, are 1..max_result
        chat         whether a problem is a chat message for the tokenizer's template, or plain text
        """
        weights = read_weights("task word-problems: steps", steps or DEFAULT_STEPS, range(1, MAX_STEPS + 1))
        limits = ChainLimits(weights, max_number, max_result)

        def draw(rng: random.Random, split: Split) -> Record:
            chain = draw_chain(rng, split, limits)
            text = tell_story(chain, rng)
            prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
            return {**prompt, "answer": str(chain.values[-1])}

        return self.draw_each(num, seed, split, draw)


TASK = WordProblems()
