"""The live lines of a terminal, below the table.

⠋ step 4 of 80                                          ━━━━━━━╸        9 min 21 s left
  37 / 64 responses · 1,204 tok/s · longest 512 tokens
  ranks: 1 generating, 1 training the drafter
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tlt.training.report.progress import PhaseProgress
from tlt.training.report.words import duration

REFRESHES_PER_SECOND = 2
"""A refresh takes about a millisecond from the engine."""


class LiveLines:
    """what: work other than generating a step's responses.
    num_steps: of the whole run; None: no bar.
    stopping: said once the user has asked the run to stop."""

    def __init__(
        self, console: rich.console.Console, num_steps: int | None, stopping: Callable[[], str] = str
    ) -> None:
        self.what = ""
        self.progress: PhaseProgress | None = None
        self._num_steps, self._stopping = num_steps, stopping
        self._step: int | None = None
        self._recent: deque[float] = deque(maxlen=8)
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def note_step(self, step: int, seconds: float) -> None:
        self._step = step
        self._recent.append(seconds)

    def _draw(self) -> RenderableType:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=2, justify="right")
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        cells: list[RenderableType] = [self._spinner, Text(self._headline())]
        if self._num_steps and self._step is not None and self._recent:
            seconds_left = (self._num_steps - self._step) * sum(self._recent) / len(self._recent)
            is_stepping = seconds_left > 0 and not self.what  # the time of anything else is unknown
            line.add_column(width=16)
            line.add_column(justify="right", no_wrap=True)
            bar = ProgressBar(self._num_steps, self._step, complete_style="cyan", finished_style="cyan")
            left = Text(f"{duration(seconds_left)} left" if is_stepping else "", style="dim")
            cells += [bar, left]
        line.add_row(*cells)
        lines = Table.grid(expand=True)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        lines.add_row(line)
        if self.progress is not None:
            for part in filter(None, (self.progress.figures, self.progress.ranks)):
                lines.add_row(Text(f"   {part}", style="dim"))
        if stopping := self._stopping():
            lines.add_row(Text(f"   {stopping}", style="yellow"))
        return Padding(lines, (1, 0, 0, 0))

    def _headline(self) -> str:
        of_all = f" of {self._num_steps}" if self._num_steps else ""
        step = "" if self._step is None else f"after step {self._step}{of_all}"
        return "  ".join(part for part in (step, self.what) if part) or "first step"
