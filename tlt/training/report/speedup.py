"""The speedup of a run's rollouts by speculation, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tlt.training.report.ratio import Ratio
from tlt.training.report.step_record import StepRecord


def speedup_of(steps: Sequence[StepRecord]) -> Ratio | None:
    """Geometric mean with a 95 % interval; None: no pair was measured."""
    pairs = [step.speedup for step in steps if step.speedup.num_tokens]
    return Ratio.of([pair.speedup for pair in pairs]) if pairs else None


def told_speedup(speedup: Ratio) -> Text:
    num = len(speedup.values)
    text = Text(f"{speedup.mean:.2f}", style="bold")
    if speedup.low is not None and speedup.high is not None:
        text.append(f" [{speedup.low:.2f}, {speedup.high:.2f}]", style="not bold")
        if speedup.low <= 1 <= speedup.high:
            text.append(", not resolved", style="not bold")
    return text.append(f", measured on {num} pair{'s' * (num != 1)} of rollouts", style="dim")
