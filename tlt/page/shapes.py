"""The content of charts as plain values: lines, bars, areas, rectangles. charts.py draws them.

Each shape has a label, and a color and a dash by number: charts.py holds the palettes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt.page.gather import Values


@dataclass(frozen=True)
class Line:
    """A line through points.

    low, high: a band around it; None: none is known.
    behind: a faint line that belongs to it, such as each step's own value behind a moving average.
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
    """Areas stacked upon each other; `layers` by label, from the bottom."""

    x: Values
    layers: dict[str, Values]


@dataclass(frozen=True)
class Bars:
    """Bars over categories, one for each."""

    label: str
    names: list[str]
    heights: Values
    color: int


@dataclass(frozen=True)
class Cells:
    """A table of colored cells, each a share of its column. notes: a text by cell, shown on demand."""

    rows: list[str]
    columns: list[str]
    shares: Values
    notes: list[list[str]]


@dataclass(frozen=True)
class Stretches:
    """Rows of colored stretches of time. stretches: (row, label, start, end)."""

    rows: list[str]
    stretches: list[tuple[str, str, float, float]]


Shape = Line | Areas | Bars | Cells | Stretches


@dataclass(frozen=True)
class Chart:
    """A chart.

    key: names it on the page.
    see: one sentence that says what to see in it.
    is_by_step: whether x counts steps: all such charts move together.
    x_end: x goes from 0 to here, and charts of the same end move together; None: as far as there are values.
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


def moving_mean(values: Values, width: int) -> tuple[Values, Values, Values]:
    """Returns (mean, low, high) over windows of `width` values around each: the band is the mean's 95 %
    interval by the scatter within the window. Values that do not exist are left out."""
    half = width // 2
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    known = [window[np.isfinite(window)] for window in windows]
    mean = np.array([window.mean() if len(window) else np.nan for window in known])
    error = np.array([1.96 * w.std(ddof=1) / np.sqrt(len(w)) if len(w) > 1 else np.nan for w in known])
    return mean, mean - error, mean + error
