"""Charts of speculation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tlt.apps.page.gather import RunRecords, Values, is_known
from tlt.apps.page.series import label_of
from tlt.apps.page.shapes import Cells, Chart, Line, Shape
from tlt.apps.page.time_use import StepTime

MAX_STRATEGIES = 12
FEWEST_STEPS = 4
"""Fewer steps are not split into early and late ones."""


def depth_chart(runs: Sequence[RunRecords]) -> Chart | None:
    shapes = list[Shape]()
    for number, run in enumerate(runs):
        names = [name for name in run.names if name.startswith("rollout/draft_acceptance_rate_pos_")]
        by_depth = np.array([run.values(name) for name in names]).reshape(len(names), len(run.steps))
        fifth = max(len(run.steps) // 5, 1)
        parts = {"first fifth of the steps": by_depth[:, :fifth], "last fifth": by_depth[:, -fifth:]}
        if len(run.steps) < FEWEST_STEPS:
            parts = {"all steps": by_depth}
        for place, (label, part_DS) in enumerate(parts.items()):
            rates = _mean_of_rows(part_DS)
            if is_known(rates):
                depths = np.arange(1.0, len(rates) + 1)
                color = number if len(runs) > 1 else place
                dash = 1 - place if len(runs) > 1 and len(parts) > 1 else 0
                shapes.append(Line(label_of(run, label, runs), depths, rates, color, dash))
    see = "The share of all drafts that was kept to each depth: it falls where drafts go astray, or end."
    title = "Acceptance by depth"
    return Chart("depth", title, see, "depth in the draft", "share kept", shapes) if shapes else None


def _mean_of_rows(values_DS: Values) -> Values:
    known = np.isfinite(values_DS)
    counts = known.sum(axis=1)
    return np.where(counts, np.where(known, values_DS, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)


def batch_chart(run: RunRecords, times: Sequence[StepTime]) -> Chart | None:
    seconds = defaultdict[tuple[str, int], float](float)
    tokens = defaultdict[tuple[str, int], float](float)
    for span in (span for time in times for spans in time.engine.values() for span in spans):
        key = span.strategy, (span.num_running - 1).bit_length()
        seconds[key] += span.end - span.start
        tokens[key] += span.num_tokens
    if not seconds:
        return None
    by_name = defaultdict[str, float](float)
    for (name, _), spent in seconds.items():
        by_name[name] += spent
    ranked = sorted(by_name, key=lambda name: -by_name[name])
    rows, rest = ranked[:MAX_STRATEGIES], ranked[MAX_STRATEGIES:]
    sizes = list(range(max(size for _, size in seconds) + 1))
    groups = [[name] for name in rows] + ([rest] if rest else [])
    spent_SB = np.array([[sum(seconds[name, size] for name in group) for size in sizes] for group in groups])
    made_SB = np.array([[sum(tokens[name, size] for name in group) for size in sizes] for group in groups])
    shares = spent_SB / np.maximum(spent_SB.sum(axis=0), 1e-12)
    notes = [
        [
            f"{100 * share:.0f} % of the time at this batch size, {made / spent:,.0f} tokens/s"
            if spent
            else "never"
            for share, spent, made in zip(*row, strict=True)
        ]
        for row in zip(shares, spent_SB, made_SB, strict=True)
    ]
    others = "others" + " " * sum(name.strip() == "others" for name in rows)
    cells = Cells(rows + ([others] if rest else []), [_sizes(size) for size in sizes], shares, notes)
    see = "The shares of strategies in the engine's time, by batch size: long drafts pay in small batches."
    return Chart("batch", "Strategy by batch size", see, "running responses", "strategy", [cells])


def _sizes(exponent: int) -> str:
    last = 1 << exponent
    first = last // 2 + 1
    return str(last) if first >= last else f"{first}–{last}"
