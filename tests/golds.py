r"""Pairs of a gold answer and a response whose verdict is known because both are written from exact numbers.

A pair is right where the response's answer has the gold's value as a Fraction, and nothing else decides it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tlt.base.io.recipes import find_recipe
from tlt.base.types import UserError
from tlt.tasks.base import PreparesRecords, get_task

SUMS = f"{find_recipe('smollm2').with_name('arithmetic.py')}:TASK"
STORIES = f"{find_recipe('math').with_name('word_problems.py')}:TASK"
"""Tasks of recipes, by their files."""
UNREADABLE = (
    "12 apples",
    "no idea",
    "",
    "n/a",
    "x + 1",
    "1,2",
    "12,34",
    "0,0",
    "1/0",
    "3 or 4",
    "1e99999",
    None,
    True,
)
"""Golds that are no number: their rows are refused."""
GOLD = "unreadable gold"
THOUGHTS = ("<think>", "Well. <think>", "<think>a</think> <think>")


def wrong_verdicts(task: str, num: int, seed: int) -> list[tuple[Pair, bool | None]]:
    """Returns the pairs of which a task gives another verdict than the known one, with that verdict; None: the
    row was refused. What is scored must not raise."""
    judge, wrong = get_task(task), []
    assert isinstance(judge, PreparesRecords)
    for pair in draw_pairs(num, seed, in_latex=task == "math"):
        row = {"problem_id": "1", "prompt": "?", "answer": pair.gold}
        try:
            problem = judge.prepare(row if task == "math" else row | {"search": "boxed"}, {})
        except UserError:
            found = None
        else:
            assert problem is not None
            found = bool(get_task(task).score(problem, pair.text)["solved"])
        if found != pair.is_right:
            wrong.append((pair, found))
    return wrong


@dataclass(frozen=True)
class Pair:
    """gold: a column of a row. text: a response. is_right: None where the row must be refused."""

    gold: object
    text: str
    is_right: bool | None


def draw_pairs(num: int, seed: int, in_latex: bool) -> Iterator[Pair]:
    """Yields pairs. in_latex: whether answers may be fractions and powers of LaTeX, and have units."""
    rng = random.Random(f"golds {seed}")
    for _ in range(num):
        value = draw_value(rng)
        gold: object = write(value, rng, in_latex=False)
        if value.denominator == 1 and rng.random() < 0.2:
            gold = int(value)
        kind = rng.choice(
            ("right", "right", "right", "wrong", "wrong", "list", "comma", "words", "thought", GOLD)
        )
        kind = "right" if kind == GOLD and in_latex else kind
        answer, is_right = write(value, rng, in_latex), kind == "right"
        if kind == "wrong":
            answer = write(other(value, rng), rng, in_latex)
        elif kind == "list":
            answer = rng.choice(("{0}, {1}", "{0} or {1}", "{1}, {0}", "{0} and {1}", "{0}, {0}")).format(
                answer, write(other(value, rng), rng, in_latex=False)
            )
        elif kind == "comma":
            gold, answer = misplaced_comma(rng)
        elif kind == "words":
            answer = rng.choice(("no idea", "I do not know", "", "fifteen", "x", "\\frac{", "nan", "inf"))
        elif kind == GOLD:
            gold, answer = rng.choice(UNREADABLE), rng.choice(("no idea", "12", answer))
        text = rf"So it is \boxed{{{answer}}}."
        if kind == "thought":
            text = rng.choice(THOUGHTS) + text + rng.choice(("", "</think> It is 15.5, no box.", " and"))
        elif rng.random() < 0.2:
            text = rf"<think>\boxed{{{write(other(value, rng), rng, in_latex=False)}}}</think>{text}"
        yield Pair(gold, text, None if kind == GOLD else is_right)


def draw_value(rng: random.Random) -> Fraction:
    """Returns a whole number, a decimal or a fraction, from tiny to huge."""
    whole = rng.choice((0, 1, rng.randint(2, 99), rng.randint(1000, 9999), rng.randint(10**6, 10**16)))
    kind = rng.choice(("whole", "whole", "decimal", "fraction", "tiny"))
    value = Fraction(whole)
    if kind == "decimal":
        value += Fraction(rng.randint(1, 10**7), 10 ** rng.randint(1, 7))
    elif kind == "fraction":
        value = Fraction(rng.randint(1, 99), rng.randint(2, 99))
    elif kind == "tiny":
        value = Fraction(rng.randint(1, 99), 10 ** rng.randint(6, 40))
    return -value if rng.random() < 0.2 else value


def other(value: Fraction, rng: random.Random) -> Fraction:
    """Returns another number, often a near one."""
    near = (value + 1, -value, value * 10, value / 10, value * 2, value * (1 + Fraction(1, 10**9)))
    far = (Fraction(7), Fraction(1, 3), value + Fraction(1, 10**30), draw_value(rng))
    return rng.choice([number for number in (*near, *far) if number != value])


def write(value: Fraction, rng: random.Random, in_latex: bool) -> str:
    """Returns the exact value in one of the forms that people write."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    forms = [f"{size.numerator}/{size.denominator}", f"{size.numerator * 3}/{size.denominator * 3}"]
    latex = [
        rf"\frac{{{size.numerator}}}{{{size.denominator}}}",
        rf"\dfrac{{{size.numerator * 2}}}{{{size.denominator * 2}}}",
    ]
    if size.denominator == 1:
        thousands = f"{int(size):,}"
        forms = [str(size), thousands, f"{size}.0", f"{thousands}.00", f"${thousands}", f"{size}.", *forms]
        latex += [rf"{size}\text{{ apples}}", thousands.replace(",", "{,}"), thousands.replace(",", "\\,")]
        latex += [f"{size} dollars", rf"\${size}", f"x = {sign}{size}"]
    elif (decimal := as_decimal(size)) is not None:
        digits, places = decimal
        padded = digits.rjust(places + 1, "0")
        forms = [f"{padded[:-places]}.{padded[-places:]}", f"{padded[:-places]}.{padded[-places:]}0", *forms]
        forms.append(f"{digits}e-{places}")
        latex.append(rf"{digits} \times 10^{{-{places}}}")
    if size > 1 and size.denominator > 1:
        forms.append(f"{int(size)} {(size - int(size)).numerator}/{size.denominator}")
    form = rng.choice(forms + latex if in_latex else forms)
    if form.startswith("x"):
        return form
    return rng.choice(("-", "\u2212") if sign else ("",)) + form


def as_decimal(size: Fraction) -> tuple[str, int] | None:
    """Returns (digits, places) of a number whose decimals end; None: they do not."""
    for places in range(1, 60):
        if 10**places % size.denominator == 0:
            return str(int(size * 10**places)), places
    return None


def misplaced_comma(rng: random.Random) -> tuple[str, str]:
    """Returns a whole number, and its digits with a comma where none belongs."""
    digits = str(rng.randint(10, 10**7))
    place = rng.choice([i for i in range(1, len(digits)) if len(digits) - i != 3 or i > 3])
    return digits, f"{digits[:place]},{digits[place:]}"
