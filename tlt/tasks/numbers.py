r"""Reads the exact number that a text is: `-1,234.5`, `3/4`, `3 1/2`, `\$12`, `1.6e-19`.

A comma or a space separates thousands only before groups of three digits: `1,2` is no number.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

WHOLE = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)"
LONGEST = 1000
"""A longer text is no number."""

_DECIMAL = rf"(?:{WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?"
_EXACT = re.compile(rf"([-+]?)(?:(\d+) +(?=\d+/\d+$))?({_DECIMAL})(?:/({_DECIMAL}))?")
_SEPARATOR = re.compile(r"(?<=\d)(?:\\[,;:!]|\{,\}|[\u00a0\u2009\u202f])(?=\d)|(?<=\d) (?=\d{3}(?![\d/]))")
_MINUS_SIGNS = str.maketrans("\u2212\u2013", "--")  # the minus sign and the en dash


def to_number(text: str) -> Fraction | None:
    plain = _SEPARATOR.sub(",", text[: 2 * LONGEST].strip().translate(_MINUS_SIGNS))
    plain = plain.replace("\\$", "").replace("$", "").removesuffix(".").strip()
    match = _EXACT.fullmatch(plain)
    if match is None or len(text) > LONGEST:
        return None
    sign, whole, numerator, denominator = match.groups()
    divisor = _value(denominator or "1")
    if not divisor:
        return None
    value = _value(whole or "0") + _value(numerator) / divisor
    return -value if sign == "-" else value


def gold_text(value: object) -> str | None:
    """A float gets 15 digits: 0.1 + 0.2 is 0.3. None: neither text nor a finite number."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
