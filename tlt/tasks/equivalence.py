"""Compares answers as mathematics: plain numbers exactly, anything else by math-verify.

math-verify compares decimals to six places: all tiny numbers are equal. Here a decimal equals numbers of its
value; from six digits on it may round a fraction or an irrational number.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.types import UserError
from tlt.tasks.numbers import to_number

ROUNDED = Fraction(1, 10**6)
"""Rounding to six digits errs by at most five times this part."""
EXACT_DIGITS = 30
SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
NO_UNITS = re.compile(
    r"\b(?:and|plus|minus|times|over|out|than|not|squared|cubed|factorial|mod|modulo|sqrt|sin|cos|tan|cot|"
    r"sec|csc|log|exp|choose|half|halves|thirds?|quarters?|fifths?|percent|percentage)\b"
)
"""Words that are no unit behind a number."""

_FRACTION = re.compile(r"([-+]?)\\[dtc]?frac\{([\d.,]+)\}\{([\d.,]+)\}(.*)")
_POWER = re.compile(
    r"(.*\d)\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))"
)
_UNIT = re.compile(
    r"(.*\d[.}]?)\s*"
    r"(?:\\(?:text|mathrm|mbox)\{([^{}\\]*)\}|\s(?=[A-Za-z ]*[aeiou])([A-Za-z]{3,}(?: [a-z]+){0,2}))",
    re.DOTALL,
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}\\]*)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")


@dataclass(frozen=True)
class Quantity:
    """digit: worth of the last digit; None: a fraction.
    unit: the words behind the number.
    """

    value: Fraction
    digit: Fraction | None
    unit: str

    def equals(self, other: Quantity) -> bool:
        """Whether both are one number, or one rounds the other; units, if both have one, must agree."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        return self.value == other.value or self.rounds(other) or other.rounds(self)

    def rounds(self, other: Quantity) -> bool:
        if self.digit is None or self.digit >= 1 or _is_decimal(other.value.denominator):
            return False
        is_long = abs(self.value) >= self.digit / Fraction(ROUNDED * 10)
        return is_long and abs(self.value - other.value) * 2 <= self.digit

    def as_latex(self) -> str:
        if self.value.denominator == 1:
            return str(self.value)
        if self.digit is None or self.digit.numerator != 1:
            return rf"\frac{{{self.value.numerator}}}{{{self.value.denominator}}}"
        places = len(str(self.digit.denominator)) - 1
        digits = str(abs(self.value.numerator) * 10**places // self.value.denominator).rjust(places + 1, "0")
        return f"{'-' * (self.value < 0)}{digits[:-places]}.{digits[-places:]}"


def measure(text: str) -> Quantity | None:
    r"""Reads a number, perhaps with a unit: `\frac{1}{3}\text{ cm}`, `1.6\times 10^{-19}`, `5 million`;
    else None."""
    text, unit, scale = text.strip().removesuffix(".").replace("\u2212", "-"), "", 1
    if match := _UNIT.fullmatch(text):
        behind = (match[2] or match[3] or "").lower()
        words = behind.split()
        if NO_UNITS.search(behind) or not all(map(str.isalpha, words)):
            return None
        while words and words[0] in SCALES:
            scale *= SCALES[words.pop(0)]
        text, unit = match[1], " ".join(word.removesuffix("s") for word in words)
    if match := _FRACTION.fullmatch(text):
        text = f"{match[1]}{match[2]}/{match[3]}{match[4]}"
    if match := _POWER.fullmatch(text):
        text = f"{match[1]}e{match[2] or match[3]}"
    value = to_number(text)
    return None if value is None else Quantity(value * scale, _last_digit(text, scale), unit)


def _last_digit(number: str, scale: int) -> Fraction | None:
    if "/" in number:
        return None
    digits, _, exponent = number.lower().partition("e")
    places = len(digits.partition(".")[2].rstrip("$ "))
    return scale * Fraction(10) ** (int(exponent or 0) - places)


def is_equal(gold: str, answer: str) -> bool:
    """Raises ValueError for a gold answer that math-verify cannot read."""
    wanted, given = measure(gold), measure(answer)
    if wanted is not None and given is not None:
        return wanted.equals(given)
    if (word := _as_word(gold)) is not None:
        return word == _as_word(answer)
    if (wanted and _is_list(answer)) or (given and _is_list(gold)):
        return False
    parse, verify = _math_verify()
    expected = _parsed(gold if wanted is None else wanted.as_latex())
    if not expected:
        raise ValueError(
            f"the answer {gold!r} is no mathematics that math-verify can read; leave the problem out"
        )
    said = answer if given is None else given.as_latex()
    return bool(verify(expected, parse(_as_latex(said)), timeout_seconds=None))


def _as_word(text: str) -> str | None:
    """None, too, for a word so short that it may be a product of variables."""
    words = " ".join(_TEXT.sub(r" \1 ", text).replace("$", "").lower().rstrip(". ").split())
    return words if len(words) > 2 and words.replace(" ", "").isalpha() else None


def _is_list(answer: str) -> bool:
    """math-verify takes a list of equal numbers, `5, 5`, for one. Commas in parentheses are a function's or a
    point's."""
    outside = re.sub(r"\([^()]*\)", "", re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))", "", answer))
    return re.search(r",|;|\b(?:and|or)\b", outside) is not None


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> Any:
    return _math_verify()[0](_as_latex(gold))


def _as_latex(answer: str) -> str:
    answer = re.sub(r"(?<=\d)\\[,!](?=\d{3}(?!\d))", "", answer)  # thousands; it would multiply
    answer = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
    return answer if "$" in answer.replace("\\$", "") or "\\(" in answer else f"\\boxed{{{answer}}}"


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable[[str], Any], Callable[..., bool]]:
    require_math_verify()
    import math_verify

    # it warns that nothing bounds its time: the worker's pool does
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    targets = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())
    return lambda text: math_verify.parse(text, targets, parsing_timeout=None), _own_grader().verify


def _own_grader() -> Any:
    """A copy of math-verify's grader with our `_are_close`: the user's reward functions may import the
    original."""
    spec = importlib.util.find_spec("math_verify.grader")
    assert spec is not None, "math-verify is installed"
    assert spec.loader is not None, "it is a file"
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    compares = grader.sympy_numeric_eq

    def compares_relatively(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        is_close = compares(a, b, float_rounding, numeric_precision)
        if not is_close or hasattr(a, "shape") or hasattr(b, "shape"):  # of matrices it compares the numbers
            return bool(is_close)
        percents = grader.get_pct_val(a, a), grader.get_pct_val(b, b)
        return _are_close(a, b) or (percents != (a, b) and _are_close(*percents))

    grader.sympy_numeric_eq = compares_relatively  # type: ignore[attr-defined]
    return grader


def _are_close(a: Any, b: Any) -> bool:
    """Compares two sympy expressions: decimals to six digits, unless both end."""
    from sympy import Float, Rational

    a, b = (x.doit() for x in (a, b))
    if a.free_symbols or b.free_symbols:
        return False  # math-verify then compares formulas
    exact = [Rational(str(x)) if isinstance(x, Float) else x for x in (a, b)]
    if any(isinstance(x, Float) for x in (a, b)) and not all(map(_ends, exact)):
        return bool(abs(exact[0] - exact[1]).evalf() <= 5 * ROUNDED * max(abs(x).evalf() for x in exact))
    difference = (exact[0] - exact[1]).evalf(EXACT_DIGITS, chop=False)
    scale = max(abs(x.evalf(EXACT_DIGITS)) for x in exact)
    return bool(abs(difference) <= scale * Rational(1, 10**15))


def _ends(number: Any) -> bool:
    return bool(number.is_Rational) and _is_decimal(int(number.q))


def _is_decimal(denominator: int) -> bool:
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(f"task math: math-verify is not installed; {how_to_install('math')}")
