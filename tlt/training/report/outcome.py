"""The rows of a run's summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from tlt.training.report.ratio import Ratio
from tlt.training.report.step_record import StepRecord
from tlt.training.report.words import duration, near


@dataclass(frozen=True)
class Gain:
    """The first and the last evaluation, as pairs.

    p_value: of the paired difference in rewards (`by_reward`) or solve rates.
    """

    steps: tuple[int, int]
    solve_rates: tuple[float, float]
    rewards: tuple[float, float]
    p_value: float
    by_reward: bool = False


@dataclass(frozen=True)
class Outcome:
    """gain: None: there are no two evaluations to compare.
    left_out: why an evaluation is not in the gain.
    seconds: since the user's command began.
    recorded_seconds: of all steps and evaluations; None: this command has done them all.
    drafted: size of the last draft vocabulary, share of tokens in it; None: the whole vocabulary.
    """

    gain: Gain | None
    left_out: Sequence[str]
    num_steps: int
    seconds: float
    recorded_seconds: float | None = None
    drafted: tuple[int, float] | None = None
    speedup: Ratio | None = None


def summary_rows(outcome: Outcome, products: Mapping[str, Path]) -> Iterator[tuple[str, Text]]:
    if outcome.gain is not None:
        yield from _gain_rows(outcome.gain)
    for reason in outcome.left_out:
        yield "", Text(reason, style="italic")
    time = f"{duration(outcome.seconds)}, {outcome.num_steps} steps"
    if outcome.recorded_seconds is not None:
        recorded = f"{duration(outcome.recorded_seconds)} for {outcome.num_steps} steps and the evaluations"
        time = f"{recorded}; {duration(outcome.seconds)} since this command began"
    yield "time", Text(time)
    if outcome.speedup is not None:
        yield "speedup", told_speedup(outcome.speedup)
    if outcome.drafted is not None:
        size, coverage = outcome.drafted
        yield "drafts", Text(f"from the {size:,} most frequent tokens, {coverage:.1%} of the last step's")
    yield from _product_rows(products)


def evaluation_rows(
    solved: Mapping[str, float], rewards: Mapping[str, float], seconds: float, products: Mapping[str, Path]
) -> Iterator[tuple[str, Text]]:
    """solved, rewards: by problem."""
    rate, error = _mean_and_error(solved)
    yield "solved", Text(f"{rate:.2%} of {len(solved):,} held-out problems, standard error {error:.2%}")
    reward, error = _mean_and_error(rewards)
    yield "reward", Text(f"{reward:.3f}, standard error {error:.3f}")
    yield "time", Text(duration(seconds))
    yield from _product_rows(products)


def _mean_and_error(by_problem: Mapping[str, float]) -> tuple[float, float]:
    mean = sum(by_problem.values()) / len(by_problem)
    return mean, math.sqrt(sum((one - mean) ** 2 for one in by_problem.values())) / len(by_problem)


def _product_rows(products: Mapping[str, Path]) -> Iterator[tuple[str, Text]]:
    for name, path in products.items():
        yield name, Text(near(path), style="cyan")


def _gain_rows(gain: Gain) -> Iterator[tuple[str, Text]]:
    first, last = gain.steps
    between = "before → after" if first == 0 else f"after {first} → {last} updates"
    solved = "solved", _rise(*gain.solve_rates, ".1%"), "of"
    reward = "reward", _rise(*gain.rewards, ".3f"), "on"
    (name, judged, link), other = (reward, solved) if gain.by_reward else (solved, reward)
    yield name, judged.append(f" {link} held-out problems, {between}", style="dim")
    yield "", Text(f"paired sign-flip test, one-sided: p {written_p_value(gain.p_value)}", style="dim")
    yield other[:2]


def _rise(before: float, after: float, form: str) -> Text:
    style = "bold green" if after > before else "bold"
    return Text(f"{before:{form}} → ").append(f"{after:{form}}", style=style)


def written_p_value(value: float) -> str:
    """Such as "= 0.012" or "< 0.0001"."""
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"


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
