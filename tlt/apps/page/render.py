"""Makes the page, one HTML file that loads nothing. A run's text is always escaped."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tlt.apps.page import series, settings, speculation, summary, timing
from tlt.apps.page.charts import draw, library
from tlt.apps.page.gather import RunRecords, read_runs
from tlt.apps.page.response_sample import show_responses
from tlt.apps.page.shapes import Chart
from tlt.apps.page.time_use import USE_NAMES
from tlt.apps.page.timing import RunTime
from tlt.apps.page.tokens import DRAFTERS

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "responses.js")


@dataclass(frozen=True)
class Placed:
    id: str
    chart: Chart
    run: str = ""


@dataclass
class PageSection:
    id: str
    title: str
    charts: list[Placed] = field(default_factory=list)
    tables: list[tuple[summary.Table, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    id: str
    label: str
    charts: list[Placed]


@np.errstate(all="ignore")  # a run that diverged has figures whose squares overflow
def make_page(folders: Sequence[Path], made: datetime | None = None) -> str:
    runs = read_runs(folders)
    times = [timing.read_times(run) for run in runs]
    sections = [section for section in _sections(runs, times) if section.charts]
    panels = _panels(times, len(runs) > 1)
    placed = [one for section in sections for one in section.charts]
    placed += [one for panel in panels for one in panel.charts]
    drawn = {one.id: draw(one.chart, one.id, _steps_of(runs)) for one in placed}
    responses, response_notes = show_responses(runs)
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").render(
        title="TLT run " + " and ".join(run.name for run in runs),
        made=f"{made or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        glance=summary.glance(runs),
        differences=summary.differences(*runs) if len(runs) == 2 else None,
        notes=_notes(runs, times),
        nonce=secrets.token_urlsafe(16),
        settings=_settings(runs),
        failures=[(run.name, run.failures) for run in runs if run.failures],
        sections=sections,
        panels=panels,
        drawn=drawn,
        items=in_script({key: {"item": one.item, "together": one.together} for key, one in drawn.items()}),
        response_notes=response_notes,
        drafters=DRAFTERS,
        numbers=[
            {"name": run.name, "by_step": summary.by_step(run), "figures": summary.figures(run)}
            for run in runs
        ],
        responses=in_script(responses),
        library=Markup("\n".join(library())),
        css=Markup((ASSETS / "page.css").read_text("utf-8")),
        js=Markup("\n".join((ASSETS / name).read_text("utf-8") for name in SCRIPTS)),
    )


def in_script(value: Any) -> Markup:
    """JSON that cannot close its <script>."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _steps_of(runs: Sequence[RunRecords]) -> tuple[float, float]:
    steps = [float(one.step) for run in runs for one in run.steps]
    steps += [float(one.step) for run in runs for one in run.evaluations]
    return (min(steps), max(steps)) if steps else (0.0, 1.0)


def _settings(runs: Sequence[RunRecords]) -> dict[str, summary.Table | None]:
    is_known = any(run.config for run in runs)
    return {
        "differing": settings.differing_keys(runs) if len(runs) > 1 else None,
        "changed": settings.changed_keys(runs) if is_known else None,
        "defaults": settings.default_keys(runs) if is_known else None,
        "machines": settings.machines(runs),
    }


def _sections(runs: Sequence[RunRecords], times: Sequence[RunTime]) -> list[PageSection]:
    def of_series(specs: Sequence[series.SeriesSpec]) -> list[Placed]:
        return _placed([series.series_chart(spec, runs) for spec in specs])

    def of_each(charts: Sequence[Chart | None], key: str) -> list[Placed]:
        names = [run.name if len(runs) > 1 else "" for run in runs]
        return [
            Placed(f"{key}-{number}", chart, name)
            for number, (chart, name) in enumerate(zip(charts, names, strict=True))
            if chart is not None
        ]

    learning = PageSection(
        "learning", "Learning", _placed(series.held_out_charts(runs)) + of_series(series.LEARNING)
    )
    lengths = PageSection("lengths", "Lengths of responses", of_series(series.LENGTHS))
    turns = PageSection("turns", "Turns, tools and environments")
    if any(run.has_turns for run in runs):
        turns.charts += of_series(series.TURNS)
    time = PageSection("time", "Time", of_each([timing.use_chart(time) for time in times], "use"))
    time.charts += of_series(series.SPEED)
    if shares := _shares(times):
        time.tables.append((shares, "Where the time went, as shares of the steps whose timeline was read."))
    drafts = PageSection("speculation", "Speculation", of_series(series.SPECULATION))
    drafts.charts += _placed([speculation.depth_chart(runs)])
    drafts.charts += of_each([series.strategy_chart(run) for run in runs], "strategies")
    drafts.charts += of_each([speculation.batch_chart(time.run, time.read) for time in times], "batch")
    return [
        learning,
        lengths,
        turns,
        time,
        drafts,
        PageSection("update", "Health of the update", of_series(series.HEALTH)),
    ]


def _placed(charts: Sequence[Chart | None]) -> list[Placed]:
    return [Placed(f"chart-{chart.key}", chart) for chart in charts if chart is not None]


def _shares(times: Sequence[RunTime]) -> summary.Table | None:
    shares = [timing.shares_of_time(time) for time in times]
    names = [use for use in USE_NAMES if any(use in share for share in shares)]
    rows = [(use, [summary.Cell(summary.share(share.get(use, 0.0))) for share in shares]) for use in names]
    return summary.Table([time.run.name for time in times], rows) if rows else None


def _panels(times: Sequence[RunTime], names_run: bool) -> list[Panel]:
    panels = list[Panel]()
    for time in times:
        for chosen in time.chosen:
            key = f"panel-{len(panels)}"
            charts = [timing.rank_chart(chosen), *timing.load_charts(chosen)]
            run = time.run.name if names_run else ""
            placed = [Placed(f"{key}-{chart.key}", chart, run) for chart in charts]
            panels.append(Panel(key, f"{run}: {chosen.label}" if run else chosen.label, placed))
    return panels


def _notes(runs: Sequence[RunRecords], times: Sequence[RunTime]) -> list[str]:
    notes = []
    if len(tasks := dict.fromkeys(map(summary.task_of, runs))) > 1:
        notes.append(
            f"The runs have different tasks ({', '.join(tasks)}): their rewards, solve rates, lengths and "
            "times are not comparable."
        )
    for run, time in zip(runs, times, strict=True):
        if not run.environments:
            notes.append(f"{run.name} has no environment.jsonl: its versions and its machine are not known.")
        if run.setting("environment.deterministic", True) is False:
            notes.append(
                f"{run.name} has an environment that is not a function of what it was told "
                "(environment.deterministic = false): another run with its seed, with speculation or "
                "without, may have other tokens."
            )
        if not run.steps:
            notes.append(f"{run.name} has done no step yet.")
        elif not time.read:
            notes.append(f"{run.name} has no timeline files: where each second went is not known.")
    return notes
