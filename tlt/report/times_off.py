"""Times off of a run: how many times as fast its rollouts were as without speculation, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tlt.report.ratio import Ratio
from tlt.report.record import StepRecord


@dataclass(frozen=True)
class TimesOff:
    """Times off of a run's steps, as geometric means with 95 % intervals; None: there is no such figure.

    predicted: by the tuner, step by step, of whole rollouts.
    measured: of the pairs (accounts.py, OffPair), each a few responses.
    predicted_of_pairs: by the tuner, of these pairs.
    """

    predicted: Ratio | None
    measured: Ratio | None
    predicted_of_pairs: Ratio | None

    @staticmethod
    def of(steps: Sequence[StepRecord]) -> TimesOff | None:
        """Returns the figures of these steps; None: there are none."""
        pairs = [step.off_pair for step in steps]
        found = TimesOff(
            _mean([step.rollout.times_off for step in steps]),
            _mean([pair.times_off for pair in pairs]),
            _mean([pair.predicted for pair in pairs]),
        )
        return None if found == TimesOff(None, None, None) else found

    def rows(self) -> Iterator[tuple[str, Text]]:
        name = "times off"
        if (one := self.predicted) is not None:
            steps = _counted(len(one.values), "step")
            yield name, _figure(one).append(f" predicted, mean of {steps}", style="dim")
            name = ""
        if (one := self.measured) is not None:
            pairs = _counted(len(one.values), "pair")
            beside = self.predicted_of_pairs
            there = "" if beside is None else f", where {beside.mean:.2f} was predicted"
            yield name, _figure(one).append(f" measured on {pairs} of rollouts{there}", style="dim")


def _mean(values: Sequence[float]) -> Ratio | None:
    known = [value for value in values if value > 0]  # NaN is not
    return Ratio.of(known) if known else None


def _figure(ratio: Ratio) -> Text:
    interval = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return Text(f"{ratio.mean:.2f}", style="bold").append(interval, style="not bold")


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"
