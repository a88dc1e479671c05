"""What the user sees of a run: a table that grows by one line per step, and a summary at the end. Text only; computes nothing.

On a terminal: colours, and a live line below the table that says what is going on now. Into a file or pipe, on a dumb terminal or
under NO_COLOR: the same table as plain lines, nothing else.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tlt.report.metrics import StepRecord

WIDTH = 100
ROWS_PER_HEADER = 25
REFRESHES_PER_SECOND = 2
"""Each takes about a millisecond from the engine that shares this process."""


@dataclass(frozen=True)
class Column:
    """One quantity: its two-line heading, its width, and how a record's value is written."""

    title: str
    unit: str
    width: int
    style: str
    write: Callable[[StepRecord], str]


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _share(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}%}"


def _lengths(record: StepRecord) -> str:
    return f"{_number(record.response_tokens.p50, '.0f')} / {record.response_tokens.max}"


COLUMNS = (
    Column("step", "", 5, "bold", lambda r: str(r.step)),
    Column("reward", "mean", 7, "", lambda r: _number(r.reward_mean, ".3f")),
    Column("solved", "sampled", 8, "bold green", lambda r: _share(r.solve_rate, 1)),
    Column("tokens", "p50 / max", 12, "", _lengths),
    Column("rollout", "s", 8, "", lambda r: _number(r.rollout_seconds, ".1f")),
    Column("update", "s", 7, "", lambda r: _number(r.update_seconds, ".1f")),
    Column("speed", "tok/s", 8, "", lambda r: _number(r.tokens_per_second, ",.0f")),
    Column("accept", "length", 7, "cyan", lambda r: _number(r.accept_length, ".2f")),
    Column("idle", "s", 7, "", lambda r: _number(r.idle_seconds, ".1f")),
    Column("harvested", "of idle", 10, "magenta", lambda r: _share(r.harvested_share)),
)


@dataclass(frozen=True)
class RunSummary:
    """What is said at the end. `drafter` None: there is none. `solve_rate_before` / `_after` and `p_value` None: not
    evaluated. `resume_command` None: the run is complete."""

    policy: Path | None
    drafter: Path | None
    metrics: Path
    config: Path
    timeline: Path
    num_steps: int
    seconds: float
    solve_rate_before: float | None = None
    solve_rate_after: float | None = None
    p_value: float | None = None
    evaluation: str = ""
    resume_command: str | None = None


class TrainingConsole:
    """Prints a run. Use as a context manager; on all ranks but one pass `is_silent`.

    first_step, last_step: of this session, for the progress bar: a resumed run does not start at its first.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        is_silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self.is_live = not is_silent and stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        # A width of its own where nobody looks: a log must not depend on the terminal that wrote it.
        self._console = Console(
            file=stream,
            width=None if self.is_live else WIDTH,
            no_color=not self.is_live,
            force_terminal=self.is_live,
            quiet=is_silent,
            highlight=False,
            emoji=False,
            markup=False,
        )
        self._first_step, self._last_step = first_step, last_step
        self._clock = clock
        self._started_at = clock()
        self._num_rows = 0
        self._best = float("-inf")
        self._what = ""
        self._step = first_step
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> TrainingConsole:
        self._started_at = self._clock()
        if self.is_live:
            self._live = Live(get_renderable=self._status_line, console=self._console, refresh_per_second=REFRESHES_PER_SECOND, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def status(self, step: int, what: str) -> None:
        """What is going on now, such as "rollout · 41 of 64 responses"; shown on a terminal only."""
        self._step, self._what = step, what

    def note(self, text: str) -> None:
        """A line of its own between the rows."""
        self._console.print(Text("  ").append(text, style="italic"), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """The step's row, and a line about its evaluation where it has one."""
        if self._num_rows % ROWS_PER_HEADER == 0:
            self._header()
        self._num_rows += 1
        self._step = record.step + 1
        self._console.print(_row([(column.write(record), column.style) for column in COLUMNS]), soft_wrap=True)
        if record.evaluation_solve_rate is not None:
            self.evaluation(record.evaluation_solve_rate, f"after step {record.step}")

    def evaluation(self, solve_rate: float, when: str) -> None:
        """The solve rate on held-out problems, told apart from the sampled one; the best so far is marked."""
        line = Text("      ◆ ", style="yellow").append("held-out problems ", style="default").append(f"{when}: ", style="default")
        line.append(f"{solve_rate:.1%} solved", style="bold green")
        if solve_rate > self._best and self._best > float("-inf"):
            line.append("  best so far", style="yellow")
        self._best = max(self._best, solve_rate)
        self._console.print(line, soft_wrap=True)

    def _header(self) -> None:
        if self._num_rows:
            self._console.print()
        self._console.print(_row([(column.title, "bold") for column in COLUMNS]), soft_wrap=True)
        self._console.print(_row([(column.unit, "dim") for column in COLUMNS]), soft_wrap=True)
        self._console.print(Text("─" * (sum(column.width + 1 for column in COLUMNS) - 1), style="dim"), soft_wrap=True)

    def _status_line(self) -> RenderableType:
        num_steps = self._last_step - self._first_step + 1
        num_done = min(max(self._step - self._first_step, 0), num_steps)
        seconds = self._clock() - self._started_at
        left = f"{duration(seconds / num_done * (num_steps - num_done))} left" if num_done else duration(seconds)
        line = Table.grid(padding=(0, 1))
        line.add_column(width=2, justify="right")
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(width=16)
        line.add_column(justify="right", no_wrap=True)
        line.expand = True
        bar = ProgressBar(total=num_steps, completed=num_done, complete_style="cyan", finished_style="cyan")
        line.add_row(self._spinner, Text(f"step {self._step} of {self._last_step}  {self._what}"), bar, Text(left, style="dim"))
        return Padding(line, (1, 0, 0, 0))

    def summary(self, run: RunSummary) -> None:
        """The panel at the end; plain "name: value" lines where there is no terminal."""
        rows = list(_summary_rows(run))
        if not self.is_live:
            self._console.print()
            for name, value in rows:
                self._console.print(Text(f"{name:<10} {value.plain}"), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(name, value)
        is_complete = run.resume_command is None
        title = Text("training complete" if is_complete else "training stopped", style="bold")
        color = "green" if is_complete else "yellow"
        panel = Panel(grid, title=title, title_align="left", border_style=color, padding=(1, 2))
        self._console.print()
        self._console.print(panel, width=min(self._console.width, WIDTH))


def _row(cells: list[tuple[str, str]]) -> Text:
    return Text(" ").join(Text(f"{text:>{column.width}}", style) for column, (text, style) in zip(COLUMNS, cells, strict=True))


def _summary_rows(run: RunSummary) -> list[tuple[str, Text]]:
    rows = []
    if run.solve_rate_before is not None and run.solve_rate_after is not None:
        change = run.solve_rate_after - run.solve_rate_before
        solved = Text(f"{run.solve_rate_before:.1%} → ")
        solved.append(f"{run.solve_rate_after:.1%}", style="bold green" if change > 0 else "bold")
        if run.p_value is not None:
            solved.append(f"   p {_p_value(run.p_value)}")
        rows.append(("solved", solved))
        if run.evaluation:
            rows.append(("", Text(run.evaluation, style="dim")))
    rows.append(("time", Text(f"{duration(run.seconds)} for {run.num_steps} steps")))
    for name, path in (
        ("policy", run.policy),
        ("drafter", run.drafter),
        ("metrics", run.metrics),
        ("config", run.config),
        ("timeline", run.timeline),
    ):
        if path is not None:
            rows.append((name, Text(_near(path), style="cyan")))
    if run.resume_command is not None:
        rows.append(("resume", Text(run.resume_command, style="bold yellow")))
    return rows


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"


def _near(path: Path) -> str:
    """The path as one would type it here."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def duration(seconds: float) -> str:
    """41 s · 9 min 21 s · 3 h 07 min"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
