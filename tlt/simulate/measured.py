"""The costs and gains of an engine's steps, as a tuner has measured them, and its choice. The statistics stay as they are, so
what has been decided once is remembered. Knows no engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt.tuning.acceptance import Curve, octave_of
from tlt.tuning.cost_model import CostModel
from tlt.tuning.step_costs import Work
from tlt.types import BatchState, Lead, Strategy

Ints = NDArray[np.int64]


class StepSeconds(Protocol):
    def __call__(self, arm: Strategy, nodes: float, batch_size: int, mean_length: float) -> float:
        """Returns the seconds of an engine step in which `nodes` tokens were drafted for a sequence on average."""
        ...


class FittedSeconds:
    """Step costs as a tuner has measured them. overhead: seconds of a replica at work for each that it expects of a step."""

    def __init__(self, model: CostModel, overhead: float = 1.0) -> None:
        self.model, self.overhead = model, overhead
        self._known: dict[tuple[Strategy, float, int, int], float] = {}

    def __call__(self, arm: Strategy, nodes: float, batch_size: int, mean_length: float) -> float:
        """Returns the seconds. nodes: where references are followed, told apart by powers of two. Elsewhere it does not count:
        chains stop as they did in the run."""
        rough, place = 2.0 ** round(math.log2(max(nodes, 1.0))) if arm.follows else 0.0, _place(mean_length)
        if (seconds := self._known.get((arm, rough, batch_size, place))) is None:
            own, levels = self.model.acceptance.drafted(arm, batch_size)
            rows = batch_size * (1 + (rough or own))
            work = Work(arm, batch_size, _length(place), rows, levels)
            seconds = self.overhead * float(self.model.costs.forecast([work]).seconds_A[0])
            self._known[arm, rough, batch_size, place] = seconds
        return seconds


class Measured:
    """model: whoever chooses; without a bonus, for there is nothing to find out.  seconds: of a step.  optimism: tokens per
    second that the model expects of its choice, for each that comes.

    For what is remembered, a lead's length counts in powers of two, and the batch's mean length in quarters of an octave.
    """

    def __init__(self, model: CostModel, seconds: StepSeconds, optimism: float = 1.0) -> None:
        self.model, self.seconds, self.optimism = model, seconds, optimism
        self._decided: dict[tuple[Any, ...], tuple[Strategy, float | None]] = {}
        self._reached: dict[tuple[Strategy, int], NDArray[Any]] = {}

    def choose(self, batch: BatchState) -> tuple[Strategy, float | None]:
        """Returns (what CostModel decides on for this batch, the tokens per second that it expects without references; None:
        it follows none)."""
        place, rough = _place(batch.mean_length), sorted(map(_rounded, batch.leads))
        key = batch.num_running, place, *rough
        if (found := self._decided.get(key)) is None:
            leads = tuple(Lead(rate, length) for rate, length in rough)
            known = replace(batch, mean_length=_length(place), leads=leads)
            strategy = self.model.decide(known).strategy
            others = [p.speed for p in self.model.predict(known) if not p.strategy.follows]
            found = self._decided[key] = strategy, max(others) / self.optimism if strategy.follows else None
        return found

    def draw(self, arm: Strategy, batch_size: int, uniform: NDArray[np.float64]) -> Ints:
        """Returns the drafted tokens that are kept: for each uniform number one verification of this arm."""
        key = arm, octave_of(batch_size)
        if (reached := self._reached.get(key)) is None:
            rates = self.model.acceptance.rates(Curve.of(*key))
            reached = self._reached[key] = np.cumprod(np.array(rates.accepted[: arm.depth]))[::-1].copy()
        kept: Ints = len(reached) - np.searchsorted(reached, uniform, side="right")
        return kept


def _place(mean_length: float) -> int:
    return round(4 * math.log2(mean_length))


def _length(place: int) -> float:
    return float(2 ** (place / 4))


def _rounded(lead: Lead) -> tuple[float, int]:
    return lead.rate, 2 ** int(math.log2(min(lead.length, Strategy.MAX_FOLLOWED)))
