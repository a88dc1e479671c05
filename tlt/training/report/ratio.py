"""Ratios of paired measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_T_975 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
    2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip
"""For 1, 2, ... degrees of freedom; 1.96 + 2.5 / df beyond."""


def t_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    return _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.5 / freedom


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios with its 95 % confidence interval (Student's t of the logarithms)."""

    mean: float
    low: float | None
    """None: a single pair."""
    high: float | None
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        logs = [math.log(value) for value in values]
        center = statistics.mean(logs)
        if len(logs) == 1:
            return Ratio(values[0], None, None, tuple(values))
        half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(center), math.exp(center - half), math.exp(center + half), tuple(values))

    @staticmethod
    def between(base: Sequence[float], other: Sequence[float]) -> Ratio:
        """base / other, pair by pair."""
        return Ratio.of([a / b for a, b in zip(base, other, strict=True)])
