"""The live lines of a terminal, below the table.

⠋ step 4 of 80                                          ━━━━━━━╸        9 min 21 s left
  37 / 64 responses · 1,204 tok/s · longest 512 tokens
  ranks: 1 generating, 1 training the drafter
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import rich.console
from rich.console import RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, RenderableColumn, TextColumn
from rich.spinner import Spinner
from rich.table import Column
from rich.text import Text

from tlt.training.report.progress import PhaseProgress
from tlt.training.report.words import duration

REFRESHES_PER_SECOND = 2
"""A refresh takes about a millisecond from the engine."""


class LiveLines(Progress):
    """what: work other than generating a step's responses."""

    def __init__(
        self, console: rich.console.Console, num_steps: int | None, stopping: Callable[[], str] = str
    ) -> None:
        self.what = ""
        self.phase: PhaseProgress | None = None
        self._num_steps, self._stopping = num_steps, stopping
        self._step: int | None = None
        self._recent: deque[float] = deque(maxlen=8)
        flexible, right = Column(no_wrap=True, overflow="ellipsis", ratio=1), Column(justify="right")
        bar = BarColumn(16, complete_style="cyan", finished_style="cyan", table_column=Column(width=16))
        super().__init__(
            RenderableColumn(Spinner("dots", style="cyan"), table_column=Column(width=2, justify="right")),
            TextColumn("{task.description}", style="default", markup=False, table_column=flexible),
            *([bar] if num_steps else []),
            TextColumn("{task.fields[left]}", style="dim", markup=False, table_column=right),
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            expand=True,
        )
        self._line = self.add_task("", total=num_steps, left="")
        self.start()

    def note_step(self, step: int, seconds: float) -> None:
        self._step = step
        self._recent.append(seconds)

    def get_renderables(self) -> Iterator[RenderableType]:
        if not self.tasks:  # the base class asks before there is one
            return
        left = "" if self.what else self._time_left()  # the time of anything but a step is unknown
        self.update(self._line, description=self._headline(), completed=self._step or 0, left=left)
        yield Padding(self.make_tasks_table(self.tasks), (1, 0, 0, 0))
        phase = [] if self.phase is None else [(self.phase.figures, "dim"), (self.phase.ranks, "dim")]
        for text, style in [*phase, (self._stopping(), "yellow")]:
            if text:
                yield Text(f"   {text}", style, no_wrap=True, overflow="ellipsis")

    def _time_left(self) -> str:
        """Rich's own estimate ignores evaluations between steps."""
        num_left = (self._num_steps or 0) - (self._step or 0)
        if num_left <= 0 or not self._recent:
            return ""
        return f"{duration(num_left * sum(self._recent) / len(self._recent))} left"

    def _headline(self) -> str:
        of_all = f" of {self._num_steps}" if self._num_steps else ""
        step = "" if self._step is None else f"after step {self._step}{of_all}"
        return "  ".join(part for part in (step, self.what) if part) or "first step"
