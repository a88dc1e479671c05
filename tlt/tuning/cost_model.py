"""A tuner that predicts: seconds of a step from measured seconds, tokens of a step from measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(batch, tokens in the forward, drafting)
                             └ acceptance.py               └ step_costs.py
    choose the arm with the largest   log speed + bonus x standard deviation of its estimate

Every measurement informs its neighbours: other depths of the same drafter, other batch sizes, other arms. The bonus is that of
GP-UCB (Srinivas et al., arXiv 0912.3995). So an arm that was never tried is tried only where the evidence leaves room for it to
be the best. This file knows no statistics of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.tuning.acceptance import Acceptance
from tlt.tuning.step_costs import StepCosts, drafters_of
from tlt.types import BatchState, StepOutcome, Strategy

_WEIGHT_OF_ADMISSION = 0.3
"""The weight of a step in which sequences were admitted: a drafter may have read their prompts. Where every step admits some,
all have the same weight."""


@dataclass(frozen=True)
class Prediction:
    """The expectations of an arm: tokens per second of the whole batch (`speed`), the standard deviation of its logarithm
    (`deviation`), and the seconds of an engine step."""

    strategy: Strategy
    speed: float
    deviation: float
    seconds: float


class CostModel:
    """Chooses the arm with the best prediction plus a bonus for its uncertainty.

    bonus: standard deviations added (GP-UCB's beta to the power 1/2).
    decide_every: seconds of engine time between two decisions for an unchanged batch size; bounds what deciding costs.
    """

    def __init__(self, arms: Sequence[Strategy], *, bonus: float = 0.75, decide_every: float = 0.03) -> None:
        assert Strategy.OFF in arms, "off is always an arm"
        self.arms = tuple(arms)
        self._arms_without_references = tuple(arm for arm in arms if not arm.follows)
        self.bonus, self.decide_every = bonus, decide_every
        self.acceptance, self.costs = Acceptance(), StepCosts()
        self.predicted_speed: float | None = None
        self.speed_otherwise: float | None = None
        self._choice = Strategy.OFF
        self._expected_seconds: float | None = None
        self._chosen_for: int | None = None
        """The batch size of the last decision. None: decide anew."""
        self._seconds_since = 0.0
        self._versions: tuple[int, int] | None = None
        self._previous: Strategy | None = None

    def choose(self, batch: BatchState) -> Strategy:
        versions = (batch.policy_version, batch.drafter_version)
        if versions != self._versions:
            self._age(versions)
        if batch.num_running != self._chosen_for or self._seconds_since >= self.decide_every:
            predictions = self.predict(batch)
            choice = self._best(predictions)
            self._choice, self._chosen_for, self._seconds_since = choice.strategy, batch.num_running, 0.0
            has_measured = bool(self.costs.cells)
            self.predicted_speed = choice.speed if has_measured else None
            others = [p.speed for p in predictions if not p.strategy.follows]
            self.speed_otherwise = max(others) if has_measured and choice.strategy.follows else None
            self._expected_seconds = choice.seconds if has_measured else None
        return self._choice

    def decide(self, batch: BatchState) -> Prediction:
        """Returns the arm to run now: a pure function of the statistics."""
        return self._best(self.predict(batch))

    def _best(self, predictions: Sequence[Prediction]) -> Prediction:
        return max(predictions, key=lambda p: math.log(p.speed) + self.bonus * p.deviation)

    def predict(self, batch: BatchState) -> list[Prediction]:
        arms = self.arms if batch.leads else self._arms_without_references
        costly = [as_costly(arm, _nodes(arm, batch)) for arm in arms]
        mean_A, variance_A = self.costs.predict(costly, batch.num_running, batch.mean_length)
        tokens_A, uncertainty_A = self.acceptance.expected_tokens(arms, batch.num_running, batch.leads)
        seconds_A = np.exp(mean_A)
        speed_A = batch.num_running * tokens_A / seconds_A
        deviation_A = np.sqrt(variance_A + uncertainty_A)
        rows = zip(arms, speed_A.tolist(), deviation_A.tolist(), seconds_A.tolist(), strict=True)
        return [Prediction(*row) for row in rows]

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self._seconds_since += outcome.seconds
        if strategy.follows and outcome.followed:
            self.acceptance.observe_elsewhere(strategy, outcome.accepted, outcome.drafted, outcome.followed)
        elif outcome.accepted:
            self.acceptance.observe(strategy, outcome.accepted, outcome.drafted)
        self.acceptance.observe_in_hindsight(batch.hindsight, batch.num_running)
        if not _switches_on(self._previous, strategy):  # that step also catches up with what was decoded plainly
            weight = _WEIGHT_OF_ADMISSION if batch.num_admitted else 1.0
            expected = self._expected_seconds if strategy == self._choice else None
            costly = as_costly(strategy, sum(outcome.drafted) / batch.num_running)
            self.costs.observe(costly, batch.num_running, batch.mean_length, outcome.seconds, weight, expected)
        self._previous = strategy

    def counters(self) -> dict[str, Any]:
        """Returns the statistics, as JSON. versions: of policy and drafter, that they are about."""
        versions = None if self._versions is None else list(self._versions)
        return {"acceptance": self.acceptance.counters(), "costs": self.costs.counters(), "versions": versions}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned."""
        self.acceptance.restore(counters["acceptance"])
        self.costs.restore(counters["costs"])
        self._versions = None if counters["versions"] is None else tuple(counters["versions"])
        self._chosen_for = None

    def _age(self, versions: tuple[int, int]) -> None:
        if self._versions is not None:
            self.acceptance.age()
        self._versions, self._chosen_for = versions, None


def _nodes(arm: Strategy, batch: BatchState) -> float:
    """Returns the nodes that will be drafted for a sequence on average, where the arm follows references."""
    followed = sum(min(arm.depth, lead.length) for lead in batch.leads)
    return (followed + (batch.num_running - len(batch.leads)) * arm.elsewhere.depth) / batch.num_running


def _switches_on(before: Strategy | None, now: Strategy) -> bool:
    """Returns whether a drafter runs now that did not run in the step before. It then reads what it missed: features, or
    texts."""
    ran = set() if before is None else drafters_of(before)
    return not drafters_of(now) <= ran


def as_costly(arm: Strategy, nodes: float) -> Strategy:
    """Returns what a step of an arm costs as much as, when `nodes` are drafted for a sequence on average. Where references are
    followed, they say how many that are, and not the arm; powers of two are told apart."""
    if not arm.follows:
        return arm
    budget = min(2 ** round(math.log2(max(nodes, 1.0))), Strategy.MAX_FOLLOWED)
    return Strategy(arm.drafter, budget, 1, budget)
