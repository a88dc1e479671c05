"""Tables of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from tlt.apps.page.gather import RunRecords, Values, is_known, mean_of
from tlt.base.io.plugins import without_folder
from tlt.training.report.outcome import speedup_of, told_speedup
from tlt.training.report.words import duration

PRINCIPAL = {
    "rewards/mean": "mean reward",
    "rewards/solve_rate": "solve rate",
    "step_seconds": "seconds of a step",
    "rollout/seconds": "seconds of a rollout",
    "update/seconds": "seconds of an update",
    "rollout/tokens_per_second": "tokens per second",
    "rollout/response_tokens/mean": "mean length",
    "rollout/response_tokens/max": "longest response",
    "rollout/accept_length": "accept length",
    "idle/seconds": "idle seconds, of all ranks",
    "update/entropy": "entropy",
    "update/grad_norm": "gradient norm",
}
MAX_ROWS = 200
NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """figure, at: the figure's name, and step or statistic, for programs that read the page.
    value: NaN: missing.
    """

    text: str
    value: float = math.nan
    figure: str = ""
    at: str = ""


@dataclass(frozen=True)
class Table:
    heads: list[str]
    rows: list[tuple[str, list[Cell]]]
    note: str = ""


def number(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = 0 if value == int(value) else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else NOTHING


def glance(runs: Sequence[RunRecords]) -> Table:
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    rows = [(name, [Cell(fact.get(name, NOTHING)) for fact in facts]) for name in names]
    return Table([run.name for run in runs], rows)


def _facts(run: RunRecords) -> dict[str, str]:
    facts = {
        "folder": str(run.folder),
        "model": str(run.setting("model.path", NOTHING)),
        "task": task_of(run),
        "algorithm": str(run.setting("algorithm.name", NOTHING)),
        "speculation": str(run.setting("rollout.speculation", NOTHING)),
        "ranks": str(run.setting("run.num_ranks", NOTHING)),
        "steps": f"{len(run.steps)} of {run.setting('run.num_steps', '–')}",
    }
    if run.steps:
        facts |= _results(run)
    if run.gain is not None:
        (first, last), gain = run.gain.steps, run.gain
        facts["held-out problems solved"] = " → ".join(map(share, gain.solve_rates))
        facts["held-out reward"] = " → ".join(map(number, gain.rewards))
        facts["chance of such a gain without training"] = (
            f"p = {gain.p_value:.2g}, after {first} → {last} updates"
        )
    return facts


def task_of(run: RunRecords) -> str:
    data = run.setting("task.data")
    return without_folder(str(run.setting("task.name", NOTHING))) + (f" on {data}" if data else "")


def _rate(run: RunRecords) -> float:
    counts = [
        (one.rollout.num_tokens, one.rollout.seconds) for one in run.steps if not one.rollout.recalled_tokens
    ]
    seconds = sum(seconds for _, seconds in counts)
    return sum(tokens for tokens, _ in counts) / seconds if seconds else math.nan


def _results(run: RunRecords) -> dict[str, str]:
    seconds, rollout = run.values("step_seconds").sum(), run.values("rollout/seconds").sum()
    idle, trained = run.values("idle/seconds").sum(), np.nansum(run.values("drafter/train_seconds"))
    tokens, steps = run.values("rollout/num_tokens").sum(), run.steps
    ended = datetime.fromtimestamp(steps[-1].finished_at, UTC)
    errors = int(np.nansum(run.values("rewards/num_errors")))
    speedup = speedup_of(steps)
    facts = {
        "time of all steps": f"{duration(seconds)}, {number(seconds / len(steps))} s a step",
        "last step ended": f"{ended:%Y-%m-%d %H:%M} UTC",
        "tokens generated": f"{tokens:,.0f} in {run.values('rollout/num_responses').sum():,.0f} responses",
        "tokens per second of rollout": number(_rate(run)),
        "reward at both ends": _ends(run.values("rewards/mean"), number),
        "solve rate at both ends": _ends(run.values("rewards/solve_rate"), share),
        "rollout's share of the time": share(rollout / seconds),
        "accept length": number(mean_of(run.values("rollout/accept_length"))),
        "idle time, of all ranks": duration(idle),
        "idle time that trained the drafter": share(trained / idle if idle else math.nan),
        "responses handed over": f"{np.nansum(run.values('rollout/num_migrated')):,.0f}",
    }
    if speedup is not None:
        facts["speedup by speculation"] = told_speedup(speedup).plain
    if errors:
        facts["responses without a score"] = f"{errors:,}"
    return facts


def _ends(values: Values, form: Callable[[float], str]) -> str:
    few = max(len(values) // 10, min(len(values) // 2, 5))
    if not few:
        return f"{form(mean_of(values))}, one step"
    ends = f"{form(mean_of(values[:few]))} → {form(mean_of(values[-few:]))}"
    return f"{ends}, {'means of the first and last ' + str(few) if few > 1 else 'first and last'} steps"


def differences(first: RunRecords, second: RunRecords) -> Table | None:
    common = np.intersect1d(first.x, second.x)
    if not len(common):
        return None
    rows = []
    for name, text in PRINCIPAL.items():
        a, b = (mean_of(run.values(name)[np.isin(run.x, common)]) for run in (first, second))
        if math.isfinite(a) or math.isfinite(b):
            ratio = b / a if a else math.nan
            found = {"first": a, "second": b, "difference": b - a, "ratio": ratio}
            rows.append((text, [Cell(number(value), value, name, at) for at, value in found.items()]))
    heads = [first.name, second.name, "difference", "ratio"]
    return Table(heads, rows, f"Means over the {len(common)} steps that both runs have.")


def figures(run: RunRecords) -> Table:
    rows = []
    for name in run.names:
        values = run.values(name)
        known = values[np.isfinite(values)]
        found = {
            "first": known[0],
            "last": known[-1],
            "mean": known.mean(),
            "lowest": known.min(),
            "highest": known.max(),
        }
        rows.append((name, [Cell(number(value), float(value), name, at) for at, value in found.items()]))
    return Table(["first", "last", "mean", "lowest", "highest"], rows)


def by_step(run: RunRecords) -> Table:
    """A long run shows only steps spread over it."""
    names = {name: text for name, text in PRINCIPAL.items() if is_known(run.values(name))}
    columns = {name: run.values(name) for name in names}
    count = len(run.steps)
    places = np.unique(np.linspace(0, count - 1, min(count, MAX_ROWS)).astype(int)).tolist() if count else []
    rows = [
        (
            str(run.steps[i].step),
            [Cell(number(v[i]), float(v[i]), name, str(run.steps[i].step)) for name, v in columns.items()],
        )
        for i in places
    ]
    note = f"{len(rows)} of {count} steps." if len(rows) < count else ""
    return Table([*names.values()], rows, note)
