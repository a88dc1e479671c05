"""Tables and numbers of reports as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """Returns a Ratio (as JSON) as text: its mean and, where there is one, its interval."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} – {ratio['high']:.2f})"
    return f"{ratio['mean']:.2f}{interval}"


def number(value: float | None, form: str = ".2f") -> str:
    """Returns the number as text, a dash for None."""
    return "–" if value is None else format(value, form)


def speed_text(tokens_per_second: float) -> str:
    """Returns tokens per second as text, with tenths below 100."""
    return f"{tokens_per_second:,.{1 if tokens_per_second < 100 else 0}f}"
