"""The console of a run: a header, a table with a line per step, a summary.

Colours and live lines (live_lines.py) are for terminals; files, pipes, dumb terminals and NO_COLOR get plain
lines.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import rich.console
from rich.panel import Panel
from rich.table import Column as GridColumn
from rich.table import Table
from rich.text import Text

from tlt.base.io.streams import forgive
from tlt.base.io.text import visible
from tlt.base.records import IdleUse
from tlt.training.report.live_lines import LiveLines
from tlt.training.report.log import append_to
from tlt.training.report.progress import PhaseProgress
from tlt.training.report.step_record import StepRecord
from tlt.training.report.words import cut, duration, when

WIDTH = 100
ROWS_PER_HEADER = 25
SECONDS_PER_LINE = 60.0
"""Between two plain lines about progress."""


@dataclass(frozen=True)
class Column:
    """A narrow terminal omits a spare column."""

    title: str
    unit: str
    width: int
    style: str
    write: Callable[[StepRecord], str]
    is_spare: bool = False


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _share(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}%}"


def _lengths(record: StepRecord) -> str:
    return f"{_number(record.rollout.response_tokens.p50, '.0f')} / {record.rollout.response_tokens.max}"


def _used(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    return _share(1 - seconds.get(IdleUse.REST, 0.0) / total if total else math.nan)


COLUMNS = (
    Column("step", "", 5, "bold", lambda r: str(r.step)),
    Column("reward", "mean", 7, "", lambda r: _number(r.rewards.mean, ".3f")),
    Column("solved", "sampled", 8, "bold green", lambda r: _share(r.rewards.solve_rate, 1)),
    Column("tokens", "p50 / max", 15, "", _lengths),
    Column("rollout", "s", 8, "", lambda r: _number(r.rollout.seconds, ".1f")),
    Column("update", "s", 7, "", lambda r: _number(r.update.seconds, ".1f"), is_spare=True),
    Column("speed", "tok/s", 8, "", lambda r: _number(r.rollout.tokens_per_second, ",.0f")),
    Column("accept", "length", 7, "cyan", lambda r: _number(r.rollout.accept_length, ".2f")),
    Column("idle", "s", 7, "", lambda r: _number(r.idle.seconds, ".1f"), is_spare=True),
    Column("used", "of idle", 7, "magenta", lambda r: _used(r.idle.seconds_by_use)),
)


def _columns_within(width: int) -> tuple[Column, ...]:
    fits = _row_width(COLUMNS) <= width
    return tuple(column for column in COLUMNS if fits or not column.is_spare)


def _row_width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 for column in columns) - 1


class Console:
    """enabled: False: nothing is printed.
    num_steps: of the whole run; None: no progress bar.
    log: gets the plain lines, too.
    stopping: said by the live lines once the user has asked the run to stop.
    """

    def __init__(
        self,
        enabled: bool = True,
        num_steps: int | None = None,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        *,
        log: Path | None = None,
        stopping: Callable[[], str] = str,
    ) -> None:
        stream = forgive(sys.stdout if stream is None else stream)
        is_terminal = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.is_live = enabled and is_terminal
        self._rich = _open(stream, enabled, self.is_live)
        self._all = [self._rich]
        if log is not None and enabled:
            self._add_log(log)
        self._clock = clock
        self._num_rows = 0
        self._told_at: float | None = None
        self._live = LiveLines(self._rich, num_steps, stopping) if self.is_live else None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def status(self, what: str, is_noted: bool = True) -> Iterator[None]:
        """is_noted: the plain lines say it, too."""
        if is_noted:
            self._print_plain(_note(f"{what} …"))
        if self._live is None:
            yield
            return
        outer, self._live.what = self._live.what, what
        try:
            yield
        finally:
            if self._live is not None:
                self._live.what = outer

    def progress(self, progress: PhaseProgress | None) -> None:
        """From any thread. None: the phase has ended."""
        if self._live is not None:
            self._live.phase = progress
        now = self._clock()
        if progress is None or self._told_at is None:
            self._told_at = None if progress is None else now
        elif now - self._told_at >= SECONDS_PER_LINE:
            self._told_at = now
            self._print_plain(_note(str(progress)))

    def begin_log(self, path: Path, title: str) -> None:
        self._add_log(path).print(title)

    def _add_log(self, path: Path) -> rich.console.Console:
        log = _open(append_to(path), not self._rich.quiet, is_terminal=False)
        self._all.append(log)
        return log

    def header(self, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows))
        for name, value in rows.items():
            self._print_plain(Text(f"{name:<{width}}  {value}"))
            if self.is_live:
                row = Table.grid(GridColumn(width=width, style="dim"), GridColumn(), padding=(0, 2))
                row.add_row(name, value)
                self._rich.print(row)
        self._print(Text())

    def note(self, text: str) -> None:
        self._print(_note(text))

    def step(self, record: StepRecord) -> None:
        if self._num_rows % ROWS_PER_HEADER == 0:
            self._header()
        self._num_rows += 1
        if self._live is not None:
            self._live.note_step(record.step, record.step_seconds)
        self._print_row(lambda column: (column.write(record), column.style))
        if recalled := record.rollout.recalled_tokens:
            told = f"{recalled:,} of its {record.rollout.num_tokens:,} tokens stood in the journal"
            self.note(f"step {record.step}: {told}")
        if (pair := record.speedup).num_tokens:
            measured = f"{pair.speedup:.2f}, measured on {pair.num_responses} responses"
            different = f"; {pair.num_different} differ" if pair.num_different else ""
            of = f"({pair.num_tokens:,} tokens) in {pair.seconds:.1f} s{different}"
            self.note(f"step {record.step}: speedup {measured} {of}")
        self.reward_errors(record)

    def reward_errors(self, record: StepRecord) -> None:
        if num_errors := record.rewards.num_errors:
            counts = f"{num_errors} of {record.rollout.num_responses} responses could not be scored"
            self.note(f"step {record.step}: {counts}; the first: {record.rewards.first_error}")

    def sample(self, prompt: str, text: str, reward: float | None) -> None:
        value = "no score" if reward is None else f"{reward:.3f}"
        for console in self._all:
            width = console.width - len(f"      ▸ {value}  ")
            line = Text("      ▸ ", style="magenta")
            line.append(f"{value}  ", style="bold")
            line.append(cut(prompt, width), style="dim")
            console.print(line, soft_wrap=True)
            console.print(Text(f"        {cut(text, console.width - 8)}"), soft_wrap=True)

    def evaluation(
        self,
        step: int,
        solve_rate: float | None,
        seconds: float,
        reward: float | None = None,
        is_best: bool = False,
    ) -> None:
        figures = [] if reward is None else [f"reward {reward:.3f}"]
        figures += [] if solve_rate is None else [f"{solve_rate:.1%} solved"]
        line = Text("      ◆ ", style="yellow")
        line.append(f"held-out problems {when(step)}: ", style="default")
        line.append(", ".join(figures) or "no score", style="bold green" if figures else "bold red")
        line.append(f"  {duration(seconds)}", style="dim")
        if is_best:
            line.append("  best so far", style="yellow")
        self._print(line)

    def _print(self, text: Text) -> None:
        for console in self._all:
            console.print(text, soft_wrap=True)

    def _print_plain(self, text: Text) -> None:
        for console in self._all[self.is_live :]:
            console.print(text, soft_wrap=True)

    def _print_row(self, write: Callable[[Column], tuple[str, str]]) -> None:
        for console in self._all:
            columns = _columns_within(console.width)
            console.print(_row(columns, [write(column) for column in columns]), soft_wrap=True)

    def _header(self) -> None:
        if self._num_rows:
            self._print(Text())
        self._print_row(lambda column: (column.title, "bold"))
        self._print_row(lambda column: (column.unit, "dim"))
        for console in self._all:
            width = _row_width(_columns_within(console.width))
            console.print(Text("─" * width, style="dim"), soft_wrap=True)

    def summary(
        self, rows: Sequence[tuple[str, Text]], next_commands: Sequence[str], title: str = "training complete"
    ) -> None:
        self.close()
        self._print(Text())
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._print_plain(Text(f"{name:<{width}}  {value.plain}".rstrip()))
        if self.is_live:
            self._panel(rows, title)
        if next_commands:
            self._print(Text("\nTry it:", style="dim"))
        for command in next_commands:
            self._print(Text(f"  {command}", style="bold"))

    def _panel(self, rows: Sequence[tuple[str, Text]], title: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(name, value)
        panel = Panel(
            grid, title=Text(title, style="bold"), title_align="left", border_style="green", padding=(1, 2)
        )
        self._rich.print(panel, width=min(self._rich.width, WIDTH))


def _open(stream: TextIO, enabled: bool, is_terminal: bool) -> rich.console.Console:
    """Off a terminal the width is fixed: a log does not depend on where it was written."""
    return rich.console.Console(
        file=stream,
        width=None if is_terminal else WIDTH,
        no_color=not is_terminal,
        force_terminal=is_terminal,
        force_jupyter=False,  # else rich ignores the stream and displays each line separately
        quiet=not enabled,
        highlight=False,
        emoji=False,
        markup=False,
    )


def _note(text: str) -> Text:
    return Text(f"  {visible(text)}", style="italic")


def _row(columns: Sequence[Column], cells: Sequence[tuple[str, str]]) -> Text:
    return Text(" ").join(
        Text(f"{text:>{column.width}}", style) for column, (text, style) in zip(columns, cells, strict=True)
    )
