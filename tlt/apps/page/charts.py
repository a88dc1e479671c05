"""Draws charts (shapes.py) with Bokeh, in Okabe and Ito's color-blind-safe colors."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from bokeh.resources import Resources

from tlt.apps.page.shapes import Areas, Cells, Chart, Line, Stretches

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")
DASHES = ("solid", "dashed", "dotted", "dotdash")
BY_NAME = {
    "prefill": ("#56B4E9", " "),
    "decode": ("#0072B2", " "),
    "drafts": ("#009E73", " "),
    "ahead": ("#F0E442", "/"),
    "drafter training": ("#E69F00", "x"),
    "waiting": ("#E4E4E4", "."),
    "scores, journal": ("#8A8A8A", " "),
    "measuring the speedup": ("#C9C9C9", "x"),
    "update": ("#D55E00", " "),
    "publish": ("#CC79A7", " "),
    "other": ("#FFFFFF", " "),
    "off": ("#0072B2", " "),
    "learned": ("#E69F00", " "),
    "ngram": ("#009E73", " "),
    "hybrid": ("#CC79A7", "/"),
}
"""Name → (color, hatch), in every chart."""
EDGE = "#666666"
HEIGHT = 250
ROW_HEIGHT = 26
MOST_BARS = 80
MOST_MARKED = 40
_SMALLEST, _LARGEST = 1e-300, 1e300
"""Bounds of what is drawn."""
_LINE_TOOLS = "pan,box_zoom,reset,save"


@dataclass(frozen=True)
class LegendEntry:
    """models: the glyphs that it hides."""

    label: str
    models: list[str]
    color: str
    dash: str = ""
    hatch: str = ""


@dataclass(frozen=True)
class Drawn:
    """A chart as Bokeh's JSON.

    together: charts with the same name pan and zoom together; empty: alone.
    """

    item: Any
    legend: list[LegendEntry]
    height: int
    together: str


def draw(chart: Chart, key: str, steps: tuple[float, float]) -> Drawn:
    ranges: dict[str, Any] = {"y_range": _extent(chart)} if _lines(chart) else {}
    height, together = HEIGHT, ""
    for shape in chart.shapes:
        ranges |= _ranges(shape)
        height = max(height, 110 + ROW_HEIGHT * len(getattr(shape, "rows", ())))
    if chart.is_by_step:
        margin = max(0.02 * (steps[1] - steps[0]), 0.5)
        ranges["x_range"], together = _range(steps[0] - margin, steps[1] + margin), "steps"
    elif (end := chart.x_end) is not None:
        ranges["x_range"], together = Range1d(start=0, end=end, bounds="auto"), f"seconds {end}"
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        output_backend="svg",
        tools=_LINE_TOOLS,
        toolbar_location="right",
        min_border_left=72,
        x_axis_label=chart.x_label,
        y_axis_label=chart.y_label or None,
        y_axis_type="log" if chart.is_log else "auto",
        name=key,
        **ranges,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    legend = [entry for shape in chart.shapes for entry in _draw(shape, plot, chart)]
    _style(plot, chart)
    return Drawn(json_item(plot), legend if len(legend) > 1 else [], height, together)


def _lines(chart: Chart) -> list[Line]:
    lines = [shape for shape in chart.shapes if isinstance(shape, Line)]
    return lines + [line.behind for line in lines if line.behind is not None]


def _extent(chart: Chart) -> Range1d:
    parts = [part for line in _lines(chart) for part in (line.y, line.low, line.high) if part is not None]
    values = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])
    values = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    if chart.is_log:
        values = values[values > 0]
    if not len(values):
        return _range(0.1 if chart.is_log else 0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if chart.is_log:
        return _range(max(low / 1.3, _SMALLEST), high * 1.3)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    start, end = low - margin, high + margin
    if low >= 0:
        start = max(start, 0.0)
        end = max(end, 1.0) if chart.is_count else end
    return _range(start, min(end, max(high, 1.02)) if chart.is_share else end)


def _range(start: float, end: float) -> Range1d:
    return Range1d(start=start, end=end)


def _style(plot: figure, chart: Chart) -> None:
    plot.grid.grid_line_color = "#E4E4E4"
    plot.outline_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    for text in ("axis_label", "major_label"):
        setattr(plot.axis, f"{text}_text_font_size", "12px")
        setattr(plot.axis, f"{text}_text_color", "#222222")
    lines = _lines(chart)
    if chart.is_by_step or (lines and all(np.array_equal(line.x, np.round(line.x)) for line in lines)):
        _count_whole(plot.xaxis[0], plot.xgrid[0])
    if chart.is_count:
        _count_whole(plot.yaxis[0], plot.ygrid[0])


def _count_whole(axis: Any, grid: Any) -> None:
    axis.ticker = grid.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    axis.formatter = NumeralTickFormatter(format="0,0")


def _ranges(shape: object) -> dict[str, Any]:
    if isinstance(shape, Cells):
        return {
            "x_range": FactorRange(factors=shape.columns),
            "y_range": FactorRange(factors=shape.rows[::-1]),
        }
    if isinstance(shape, Stretches):
        return {"y_range": FactorRange(factors=shape.rows[::-1])}
    return {"y_range": DataRange1d(start=0)} if isinstance(shape, Areas) else {}


def tip(text: str) -> str:
    """Escapes text for a tooltip, which Bokeh reads as HTML with placeholders."""
    return html.escape(text).replace("@", "&#64;").replace("$", "&#36;")


@singledispatch
def _draw(shape: object, plot: figure, chart: Chart) -> list[LegendEntry]:
    raise AssertionError(f"no drawing of {shape!r}")


@_draw.register
def _(shape: Line, plot: figure, chart: Chart) -> list[LegendEntry]:
    color, dash = COLORS[shape.color % len(COLORS)], DASHES[shape.dash % len(DASHES)]
    parts = _strokes(shape.behind, plot, chart, 1.0, 0.35) if shape.behind is not None else []
    if shape.low is not None and shape.high is not None:
        parts.append(plot.varea(shape.x, shape.low, shape.high, fill_color=color, fill_alpha=0.18))
    parts += _strokes(shape, plot, chart, shape.width)
    names = [f"{plot.name}|{shape.label}|{number}" for number in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        part.name = name
    return [LegendEntry(shape.label, names, color, dash)]


def _strokes(
    line: Line, plot: figure, chart: Chart, width: float, alpha: float = 1.0
) -> list[GlyphRenderer[Any]]:
    source = ColumnDataSource({"x": line.x, "y": line.y}, name=f"data|{plot.name}|{line.label}")
    look: dict[str, Any] = {"source": source, "color": COLORS[line.color % len(COLORS)], "alpha": alpha}
    dash = DASHES[line.dash % len(DASHES)]
    strokes: list[GlyphRenderer[Any]] = [plot.line("x", "y", line_dash=dash, line_width=width, **look)]
    tips = [("", tip(line.label)), (chart.x_label, "@x{0,0.[00]}"), (chart.y_label, "@y{0,0.[0000]}")]
    plot.add_tools(HoverTool(renderers=[*strokes], tooltips=tips, mode="vline", visible=False))
    if np.isfinite(line.y).sum() <= MOST_MARKED:
        strokes.append(plot.scatter("x", "y", size=5, **look))
    return strokes


@_draw.register
def _(shape: Areas, plot: figure, chart: Chart) -> list[LegendEntry]:
    source = ColumnDataSource({"x": shape.x}, name=f"data|{plot.name}|layers")
    labels, legend = list(shape.layers), list[LegendEntry]()
    width = 0.85 * (float(np.min(np.diff(shape.x))) if len(shape.x) > 1 else 1.0)
    bottom = np.zeros(len(shape.x))
    for place, label in enumerate(labels):
        color, hatch = _look(label, place)
        top = bottom + shape.layers[label]
        name = f"{plot.name}|{label}"
        look = _filled(color, hatch) | {"name": name}
        if len(shape.x) <= MOST_BARS:
            low, high, own = f"from{place}", f"to{place}", f"own{place}"
            source.data.update({low: bottom, high: top, own: shape.layers[label]})
            bars = plot.vbar("x", width, high, low, source=source, line_color=EDGE, line_width=0.3, **look)
            tips = [("", tip(label)), (chart.x_label, "@x"), (chart.y_label, f"@{own}{{0,0.[000]}}")]
            plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
        else:
            plot.varea(shape.x, bottom, top, **look)
        legend.append(LegendEntry(label, [name], color, hatch=hatch))
        bottom = top
    return legend[::-1]


@_draw.register
def _(shape: Cells, plot: figure, chart: Chart) -> list[LegendEntry]:
    plot.grid.visible = False
    places = [(i, j) for i in range(len(shape.rows)) for j in range(len(shape.columns))]
    shares = [float(shape.shares[place]) for place in places]
    data = {
        "x": [shape.columns[j] for _, j in places],
        "y": [shape.rows[i] for i, _ in places],
        "share": shares,
        "text": [f"{100 * share:.0f} %" if share >= 0.005 else "" for share in shares],
        "color": ["#FFFFFF" if share > 0.55 else "#222222" for share in shares],
        "note": [shape.notes[i][j] for i, j in places],
    }
    source = ColumnDataSource(data, name=f"data|{plot.name}|cells")
    cells = plot.rect(
        "x", "y", 0.98, 0.94, source=source, fill_color=COLORS[0], fill_alpha="share", line_color="#E4E4E4"
    )
    plot.text(
        "x",
        "y",
        "text",
        source=source,
        text_align="center",
        text_baseline="middle",
        text_color="color",
        text_font_size="11px",
    )
    tips = [("", "@y"), (chart.x_label, "@x"), ("", "@note")]
    plot.add_tools(HoverTool(renderers=[cells], tooltips=tips, visible=False))
    return []


@_draw.register
def _(shape: Stretches, plot: figure, chart: Chart) -> list[LegendEntry]:
    legend = list[LegendEntry]()
    by_label: dict[str, list[tuple[str, str, float, float]]] = {}
    for stretch in shape.stretches:
        by_label.setdefault(stretch[1], []).append(stretch)
    for place, (label, found) in enumerate(sorted(by_label.items(), key=lambda item: _order(item[0]))):
        rows, _, starts, ends = zip(*found, strict=True)
        source = ColumnDataSource({"y": rows, "start": starts, "end": ends}, name=f"data|{plot.name}|{label}")
        name, (color, hatch) = f"{plot.name}|{label}", _look(label, place)
        bars = plot.hbar(
            "y",
            0.8,
            "end",
            "start",
            source=source,
            name=name,
            line_color=EDGE,
            line_width=0.3,
            **_filled(color, hatch),
        )
        tips = [("", f"@y: {tip(label)}"), ("seconds", "@start{0.00} to @end{0.00}")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
        legend.append(LegendEntry(label, [name], color, hatch=hatch))
    return legend


def _filled(color: str, hatch: str) -> dict[str, Any]:
    return {
        "fill_color": color,
        "hatch_pattern": hatch,
        "hatch_color": "#444444",
        "hatch_alpha": 0.5,
        "hatch_scale": 8,
    }


def _look(label: str, place: int) -> tuple[str, str]:
    return BY_NAME.get(label, (COLORS[place % len(COLORS)], " "))


def _order(label: str) -> float:
    return [*BY_NAME].index(label) if label in BY_NAME else math.inf


def library() -> Iterable[str]:
    return Resources(mode="inline", components=["bokeh"]).js_raw
