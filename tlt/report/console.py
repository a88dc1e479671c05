"""The console of a run: a header, a table that grows by one line per step, and a summary at the end.

On a terminal it has colours and a live status line below the table. In a file or pipe, on a dumb terminal or
under NO_COLOR it is the same table in plain lines.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column as GridColumn
from rich.table import Table
from rich.text import Text

from tlt.accounts import IdleUse
from tlt.io.streams import forgive
from tlt.io.text import visible
from tlt.report.record import StepRecord

WIDTH = 100
ROWS_PER_HEADER = 25
REFRESHES_PER_SECOND = 2
"""A refresh takes about a millisecond from the engine that shares this process."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    title, unit: its two-line heading.
    write: formats its value of a record.
    is_spare: whether a narrow terminal omits it.
    """

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
    """Formats the share of idle time in which ranks did not rest."""
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
    Column("times", "off", 6, "cyan", lambda r: _number(r.rollout.times_off, ".2f")),
    Column("idle", "s", 7, "", lambda r: _number(r.idle.seconds, ".1f"), is_spare=True),
    Column("used", "of idle", 7, "magenta", lambda r: _used(r.idle.seconds_by_use)),
)


def _columns_within(width: int) -> tuple[Column, ...]:
    """Returns all columns, without the spare ones if a row would be wider than the terminal."""
    fits = _row_width(COLUMNS) <= width
    return tuple(column for column in COLUMNS if fits or not column.is_spare)


def _row_width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 for column in columns) - 1


class Console:
    """Prints a run. `close` it, or use `with`.

    enabled: False: every method does nothing, as on ranks other than the leader.
    num_steps: of the whole run, for the progress bar; None: no bar.
    """

    def __init__(
        self,
        enabled: bool = True,
        num_steps: int | None = None,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = forgive(sys.stdout if stream is None else stream)
        is_terminal = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.is_live = enabled and is_terminal
        # Off a terminal the width is fixed: a log must not depend on where it was written.
        self._rich = rich.console.Console(
            file=stream,
            width=None if self.is_live else WIDTH,
            no_color=not self.is_live,
            force_terminal=self.is_live,
            force_jupyter=False,  # else rich ignores the stream and displays each line separately
            quiet=not enabled,
            highlight=False,
            emoji=False,
            markup=False,
        )
        self._columns = _columns_within(self._rich.width)
        self._num_steps = num_steps
        self._clock = clock
        self._num_rows = 0
        self._what = ""
        self._step: int | None = None
        self._recent: deque[float] = deque(maxlen=8)
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        if self.is_live:
            self._live = Live(
                get_renderable=self._status_line,
                console=self._rich,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the live line and gives the terminal back. Printing still works."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Shows what the body does, such as "evaluating on 256 held-out problems", in the live line or as a
        note."""
        if not self.is_live:
            self.note(f"{what} …")
        outer, self._what = self._what, what
        try:
            yield
        finally:
            self._what = outer

    def header(self, rows: Mapping[str, str]) -> None:
        """Prints rows of name and text: the run that is about to begin."""
        width = max(map(len, rows))
        for name, value in rows.items():
            if not self.is_live:
                self._print(Text(f"{name:<{width}}  {value}"))
                continue
            row = Table.grid(GridColumn(width=width, style="dim"), GridColumn(), padding=(0, 2))
            row.add_row(name, value)
            self._rich.print(row)
        self._rich.print()

    def note(self, text: str) -> None:
        """Prints a line between the table's rows."""
        self._print(Text(f"  {visible(text)}", style="italic"))

    def step(self, record: StepRecord) -> None:
        """Prints the step's row, and notes about recalled responses and missing rewards."""
        if self._num_rows % ROWS_PER_HEADER == 0:
            self._header()
        self._num_rows += 1
        self._step = record.step
        self._recent.append(record.step_seconds)
        self._print(_row(self._columns, [(column.write(record), column.style) for column in self._columns]))
        if recalled := record.rollout.recalled_tokens:
            told = f"{recalled:,} of its {record.rollout.num_tokens:,} tokens stood in the journal"
            self.note(f"step {record.step}: {told}")
        if (pair := record.off_pair).num_tokens:
            measured = f"{pair.times_off:.2f}, measured on {pair.num_responses} responses"
            different = f"; {pair.num_different} differ" if pair.num_different else ""
            of = f"({pair.num_tokens:,} tokens) in {pair.seconds:.1f} s{different}"
            self.note(f"step {record.step}: times off {measured} {of}")
        self.reward_errors(record)

    def reward_errors(self, record: StepRecord) -> None:
        """Prints how many of the step's responses could not be scored, and why the first could not."""
        if num_errors := record.rewards.num_errors:
            counts = f"{num_errors} of {record.rollout.num_responses} responses could not be scored"
            self.note(f"step {record.step}: {counts}; the first: {record.rewards.first_error}")

    def evaluation(
        self,
        step: int,
        solve_rate: float | None,
        seconds: float,
        reward: float | None = None,
        is_best: bool = False,
    ) -> None:
        """Prints an evaluation after `step` updates.

        solve_rate, reward: None: omitted.
        is_best: whether it is better than all before it.
        """
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
        self._rich.print(text, soft_wrap=True)

    def _header(self) -> None:
        if self._num_rows:
            self._rich.print()
        self._print(_row(self._columns, [(column.title, "bold") for column in self._columns]))
        self._print(_row(self._columns, [(column.unit, "dim") for column in self._columns]))
        self._print(Text("─" * _row_width(self._columns), style="dim"))

    def _status_line(self) -> RenderableType:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=2, justify="right")
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        of_all = f" of {self._num_steps}" if self._num_steps else ""
        step = "" if self._step is None else f"after step {self._step}{of_all}"
        text = "  ".join(part for part in (step, self._what) if part) or "first step"
        cells: list[RenderableType] = [self._spinner, Text(text)]
        if self._num_steps and self._step is not None and self._recent:
            seconds_left = (self._num_steps - self._step) * sum(self._recent) / len(self._recent)
            is_stepping = seconds_left > 0 and not self._what  # the time of anything else is unknown
            line.add_column(width=16)
            line.add_column(justify="right", no_wrap=True)
            bar = ProgressBar(self._num_steps, self._step, complete_style="cyan", finished_style="cyan")
            left = Text(f"{duration(seconds_left)} left" if is_stepping else "", style="dim")
            cells += [bar, left]
        line.add_row(*cells)
        return Padding(line, (1, 0, 0, 0))

    def summary(
        self, rows: Sequence[tuple[str, Text]], next_commands: Sequence[str], title: str = "training complete"
    ) -> None:
        """Prints the run's results as rows of name and value: a panel, or plain lines off a terminal.

        next_commands: commands to try, one a line, so that they can be copied.
        """
        self.close()
        self._rich.print()
        if not self.is_live:
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                self._print(Text(f"{name:<{width}}  {value.plain}".rstrip()))
            self._try(next_commands)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(name, value)
        panel = Panel(
            grid, title=Text(title, style="bold"), title_align="left", border_style="green", padding=(1, 2)
        )
        self._rich.print(panel, width=min(self._rich.width, WIDTH))
        self._try(next_commands)

    def _try(self, commands: Sequence[str]) -> None:
        if commands:
            self._print(Text("\nTry it:", style="dim"))
        for command in commands:
            self._print(Text(f"  {command}", style="bold"))


def _row(columns: Sequence[Column], cells: Sequence[tuple[str, str]]) -> Text:
    return Text(" ").join(
        Text(f"{text:>{column.width}}", style) for column, (text, style) in zip(columns, cells, strict=True)
    )


def when(step: int) -> str:
    """Returns the moment after `step` updates, in words."""
    return f"after {step} updates" if step else "before training"


def near(path: Path) -> str:
    """Returns the path relative to the working directory if it lies there, else the absolute path."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def duration(seconds: float) -> str:
    """Formats a duration: 41 s · 9 min 21 s · 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
