"""What a run has come to, as the rows of its summary: its gain on held-out problems, its time, and where
its products lie. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from tlt.report.console import duration, near


@dataclass(frozen=True)
class Gain:
    """Compares two evaluations of the same held-out problems: pairs of the first one's figure and the last
    one's.

    steps: updates done.
    rewards: mean rewards; None: the solve rate alone is what counts.
    p_value: of the paired difference of what counts.
    """

    steps: tuple[int, int]
    solve_rates: tuple[float, float]
    rewards: tuple[float, float] | None
    p_value: float


@dataclass(frozen=True)
class Outcome:
    """Says what a run has come to.

    gain: None: there are no two evaluations to compare.
    left_out: why the first or the last evaluation is not in it.
    num_steps: updates done.
    seconds: since the user's command began.
    recorded_seconds: of all steps and evaluations together; None: this command has done all of them.
    drafted: tokens that the drafter could propose in the last step, and the part of its tokens among them;
        None: all could be.
    """

    gain: Gain | None
    left_out: Sequence[str]
    num_steps: int
    seconds: float
    recorded_seconds: float | None = None
    drafted: tuple[int, float] | None = None


def summary_rows(outcome: Outcome, products: Mapping[str, Path]) -> Iterator[tuple[str, Text]]:
    """Yields names and values. products: name → path."""
    if outcome.gain is not None:
        yield from _gain_rows(outcome.gain)
    for reason in outcome.left_out:
        yield "", Text(reason, style="italic")
    time = f"{duration(outcome.seconds)}, {outcome.num_steps} steps"
    if outcome.recorded_seconds is not None:
        recorded = f"{duration(outcome.recorded_seconds)} for {outcome.num_steps} steps and the evaluations"
        time = f"{recorded}; {duration(outcome.seconds)} since this command began"
    yield "time", Text(time)
    if outcome.drafted is not None:
        size, coverage = outcome.drafted
        yield "drafts", Text(f"from the {size:,} most frequent tokens, {coverage:.1%} of the last step's")
    for name, path in products.items():
        yield name, Text(near(path), style="cyan")


def evaluation_rows(
    solved: Mapping[str, float], seconds: float, products: Mapping[str, Path]
) -> Iterator[tuple[str, Text]]:
    """Yields names and values of an evaluation alone. solved: by problem, the share of its responses that
    were right."""
    rate = sum(solved.values()) / len(solved)
    error = math.sqrt(sum((share - rate) ** 2 for share in solved.values())) / len(solved)
    yield "solved", Text(f"{rate:.2%} of {len(solved):,} held-out problems, standard error {error:.2%}")
    yield "time", Text(duration(seconds))
    for name, path in products.items():
        yield name, Text(near(path), style="cyan")


def _gain_rows(gain: Gain) -> Iterator[tuple[str, Text]]:
    first, last = gain.steps
    between = "before → after" if first == 0 else f"after {first} → {last} updates"
    if gain.rewards is not None:
        yield "reward", _rise(*gain.rewards, ".3f").append(f" on held-out problems, {between}", style="dim")
    else:
        yield (
            "solved",
            _rise(*gain.solve_rates, ".1%").append(f" of held-out problems, {between}", style="dim"),
        )
    yield "", Text(f"paired sign-flip test, one-sided: p {_p_value(gain.p_value)}", style="dim")
    if gain.rewards is not None:
        yield "solved", _rise(*gain.solve_rates, ".1%")


def _rise(before: float, after: float, form: str) -> Text:
    return Text(f"{before:{form}} → ").append(
        f"{after:{form}}", style="bold green" if after > before else "bold"
    )


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"
