"""The content of charts as plain values; charts.py draws them. Colors and dashes number its palettes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tlt.apps.page.gather import Values
from tlt.training.report.ratio import t_975


@dataclass(frozen=True)
class Line:
    """low, high: a band around it; None: unknown.
    behind: a faint line, such as each step's value behind a moving average.
    """

    label: str
    x: Values
    y: Values
    color: int
    dash: int = 0
    low: Values | None = None
    high: Values | None = None
    width: float = 2.0
    behind: Line | None = None


@dataclass(frozen=True)
class Areas:
    """Stacked areas, `layers` from the bottom."""

    x: Values
    layers: dict[str, Values]


@dataclass(frozen=True)
class Cells:
    """Cells colored by their share of the column. notes: a text by cell."""

    rows: list[str]
    columns: list[str]
    shares: Values
    notes: list[list[str]]


@dataclass(frozen=True)
class Stretches:
    """Rows of (row, label, start, end)."""

    rows: list[str]
    stretches: list[tuple[str, str, float, float]]


Z = 1.96
SHARES = ("share", "share kept", "solve rate", "share of groups")
"""Names of y axes from 0 to 1."""

Shape = Line | Areas | Cells | Stretches


@dataclass(frozen=True)
class Chart:
    """is_by_step: x counts steps: all such charts pan together.
    x_end: charts of the same end pan together; None: as far as there are values.
    is_count: no ticks between whole numbers of y.
    """

    key: str
    title: str
    see: str
    x_label: str
    y_label: str
    shapes: list[Shape]
    is_by_step: bool = False
    is_log: bool = False
    x_end: float | None = None
    is_count: bool = False

    @property
    def is_share(self) -> bool:
        return self.y_label in SHARES


def moving_mean(values: Values, width: int, is_share: bool = False) -> tuple[Values, Values, Values]:
    """(mean, low, high) over windows of `width` values, NaNs excluded; the band is the mean's 95 %
    interval."""
    half = width // 2
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    found = [mean_interval(window[np.isfinite(window)], is_share) for window in windows]
    mean, low, high = np.array(found).reshape(-1, 3).T
    return mean, low, high


def mean_interval(values: Values, is_share: bool) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of independent values, Student's; is_share: Wilson's (1927)."""
    count = len(values)
    if not count:
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    if not is_share or not 0.0 <= mean <= 1.0:
        half = t_975(count - 1) * error if count > 1 else math.nan
        return mean, mean - half, mean + half
    answers = max(mean * (1 - mean) / error**2, count) if error > 0 else count
    middle = (mean + Z**2 / (2 * answers)) / (1 + Z**2 / answers)
    spread = math.sqrt(mean * (1 - mean) / answers + Z**2 / (4 * answers**2))
    margin = Z * spread / (1 + Z**2 / answers)
    return mean, min(max(middle - margin, 0.0), mean), max(min(middle + margin, 1.0), mean)
