"""A tuner that predicts: seconds of a step from measured seconds, tokens of a step from measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(rows of the forward, drafting)
                             └ acceptance.py               └ step_costs.py

It takes the arm with which the tokens that are left need the least time, its first step's extra seconds
included. Speculation counts a little lower there than expected, by CAUTION standard deviations: off is what
must not be lost. Another arm is tried while that pays:

    gain(arm) = time left x E[share of it that is saved], over what TRIALS steps may teach about the arm
    loss(arm) = what comes once + TRIALS steps - seconds in which the best arm brings as many tokens
    try the arm with the smallest loss of those whose gain is larger. An arm that is not expected to be faster, but only
    may be, must not lose more than MOST_LOST of the time left

This is the knowledge gradient for correlated beliefs (Frazier, Powell and Dayanik, 2009). So little is
tried in the last tokens of a batch, and never what cannot win. Off comes first, and retrieval is judged in
hindsight, for tokens do not depend on who drafts. This file knows no statistics of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.speculative.strategy import BatchState, Hindsight, Reading, StepOutcome, Strategy, StrategyTuner
from tlt.tuning.acceptance import Acceptance
from tlt.tuning.step_costs import UNKNOWN, CostPrior, StepCosts, Work, uses

TRIALS = 2.0
"""Steps that a trial is taken to need, after its first one's extra seconds."""
CAUTION = 0.7
"""Standard deviations by which speculation is taken to be slower than expected."""
MARGIN = 0.03
"""By how much speculation must be faster than off: responses that advance unevenly leave small batches
behind."""
NUM_FIRST = 3
"""Steps that off has before anything else: the later ones tell what the first, of a new shape, did not."""
CLEARLY, MOST_LOST = 1.1, 0.02
"""By how much an arm must be expected to be faster, and else the share of the time left that its trial may
lose."""
MIN_RETRIEVED = 1.05
"""Tokens per verification that retrieval must bring in hindsight before it drafts."""
HORIZON = 300.0
"""Seconds within which a trial must pay: later the texts are others, and so is the batch."""
DECIDE_EVERY = 0.03
"""Seconds of engine time between two decisions for an unchanged batch size: bounds what deciding costs."""


@dataclass(frozen=True)
class Prediction:
    """The expectations of an arm.

    speed: tokens per second of the whole batch.
    low: the same less CAUTION standard deviations.
    doubt: the standard deviation of the logarithm of its speed over that of off.
    deviation: the part of it over the best arm's speed that a trial is expected to remove.
    seconds: of an engine step.
    once: those that the next one takes besides.
    """

    strategy: Strategy
    speed: float
    low: float
    doubt: float
    deviation: float
    seconds: float
    once: float


class CostModel(StrategyTuner):
    """Chooses the arm with the best prediction, and tries others while that pays.

    prior: the drafter's size beside the target's.
    acceptance: what was recorded of the drafter; None: nothing.
    explores: whether anything is tried.
    has_hindsight: whether batches tell what retrieval would have drafted; else it is tried like any other
        drafter.
    """

    def __init__(
        self,
        arms: Sequence[Strategy],
        *,
        prior: CostPrior = UNKNOWN,
        acceptance: float | None = None,
        explores: bool = True,
        has_hindsight: bool = True,
    ) -> None:
        assert Strategy.OFF in arms, "off is always an arm"
        self.arms = tuple(arms)
        self.explores, self.has_hindsight = explores, has_hindsight
        self.acceptance, self.costs = Acceptance(acceptance), StepCosts(prior)
        self._choice = Strategy.OFF
        self._chosen_for: tuple[int, bool] | None = None
        """The batch size of the last decision, and whether references were there. None: decide anew."""
        self._seconds_since = self._seconds = 0.0
        """Engine time since the last decision, and in all."""
        self._versions: tuple[int, int] | None = None
        self._unread = 0.0
        """Tokens of a sequence, on average, that the learned drafter has not read."""
        self._narrowed: dict[tuple[bool, bool, bool], tuple[Strategy, ...]] = {}
        """Memory of `_candidates`."""
        self._known: set[tuple[int, Strategy]] = set()
        """Batch sizes and arms of which a step was made."""
        self._reading: Reading | None = None

    def choose(self, batch: BatchState) -> Strategy:
        versions = (batch.policy_version, batch.drafter_version)
        if versions != self._versions:
            if self._versions is not None:
                self.acceptance.age()
            self._versions, self._chosen_for = versions, None
        if batch.reading is not None and batch.reading is not self._reading:
            self._reading = batch.reading
            self.costs.observe_reading(
                batch.reading.num_tokens, batch.reading.num_forwards, batch.reading.seconds
            )
        place = batch.num_running, bool(batch.reference_drafts)
        if place != self._chosen_for or self._seconds_since >= min(DECIDE_EVERY, 0.02 * self._seconds):
            predictions, choice = self._decide(batch)
            self._choice, self._chosen_for, self._seconds_since = choice.strategy, place, 0.0
            has_measured = bool(self.costs.num_steps)
            self.predicted_speed = choice.speed if has_measured else None
            others = [p.speed for p in predictions if not p.strategy.uses_references]
            self.speed_otherwise = max(others) if has_measured and choice.strategy.uses_references else None
        return self._choice

    def decide(self, batch: BatchState) -> Prediction:
        """Returns the arm to run now: a pure function of the statistics."""
        return self._decide(batch)[1]

    def predict(self, batch: BatchState) -> list[Prediction]:
        return self._decide(batch)[0]

    def _decide(self, batch: BatchState) -> tuple[list[Prediction], Prediction]:
        arms, size = self._candidates(batch), batch.num_running
        cost = self.costs.forecast([self._work(arm, batch) for arm in arms])
        expected = self.acceptance.expected(arms, size, batch.reference_drafts)
        speed_A = size * expected.tokens_A / cost.seconds_A
        num_left = math.inf if batch.num_left is None else size * batch.num_left
        num_left = min(num_left, HORIZON * float(speed_A.max()))
        off = arms.index(Strategy.OFF)
        doubt_A = np.sqrt(self.costs.variance(cost.shares_AP, off) + (expected.spread_AR**2).sum(1))
        low_A = speed_A * np.exp(-CAUTION * doubt_A)
        seconds_A = cost.once_A + num_left / low_A
        seconds_A[off] /= 1 + MARGIN
        best = int(seconds_A.argmin()) if self.explores else int(speed_A.argmax())
        variance_A = self.costs.learned(cost.shares_AP, best, TRIALS) + expected.learned(best, TRIALS * size)
        columns = (speed_A, low_A, doubt_A, np.sqrt(variance_A), cost.seconds_A, cost.once_A)
        predictions = list(map(Prediction, arms, *(column.tolist() for column in columns)))
        if not self.explores:
            return predictions, predictions[best]
        if self.costs.num_steps.get(Strategy.OFF, 0) < NUM_FIRST:
            return predictions, predictions[off]
        return predictions, _trial(predictions, predictions[best], num_left) or predictions[best]

    def _candidates(self, batch: BatchState) -> tuple[Strategy, ...]:
        """Returns the arms that may run: those that follow references where there are any, retrieval where
        hindsight says that it brings something, trees and the hybrid once learned chains were tried, for they
        resemble these."""
        retrieved = self.acceptance.tokens(Hindsight.STRATEGY, batch.num_running)
        is_retrieval_worth = not self.has_hindsight or retrieved > MIN_RETRIEVED
        is_learned_known = self.acceptance.is_known(Strategy("learned", 1, 1, 1))
        key = bool(batch.reference_drafts), is_retrieval_worth, is_learned_known

        def may_run(arm: Strategy) -> bool:
            if arm.uses_references:
                return bool(batch.reference_drafts) and may_run(arm.without_reference)
            if arm.drafter == "ngram":
                return is_retrieval_worth
            return is_learned_known or (arm.width <= 1 and arm.drafter != "hybrid")

        if key not in self._narrowed:
            self._narrowed[key] = tuple(filter(may_run, self.arms))
        return self._narrowed[key]

    def _work(self, arm: Strategy, batch: BatchState) -> Work:
        size = batch.num_running
        nodes, levels = self.acceptance.drafted(arm, size, batch.reference_drafts)
        unread = self._unread * size + batch.num_admitted * batch.mean_length
        unread = min(unread, size * batch.mean_length)
        return Work(
            arm, size, batch.mean_length, size * (1 + nodes), levels, unread, (size, arm) not in self._known
        )

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self._seconds_since += outcome.seconds
        self._seconds += outcome.seconds
        if strategy.uses_references and outcome.from_reference:
            self.acceptance.observe_without_reference(
                strategy, outcome.accepted, outcome.drafted, outcome.from_reference
            )
        elif outcome.accepted:
            self.acceptance.observe(strategy, outcome.accepted, outcome.drafted)
        self.acceptance.observe_in_hindsight(batch.hindsight, batch.num_running)
        work = self._work(strategy, batch)
        work = work._replace(rows=batch.num_running + sum(outcome.drafted), levels=_levels(strategy, outcome))
        self.costs.observe(
            work, outcome.seconds, is_typical=not batch.num_admitted or batch.reading is not None
        )
        self._known.add((batch.num_running, strategy))
        if uses(strategy)[0]:
            self._unread = 0.0
        else:
            self._unread = (
                min(work.unread + outcome.num_tokens, batch.num_running * batch.mean_length)
                / batch.num_running
            )

    def counters(self) -> dict[str, Any]:
        """Returns the statistics, as JSON. versions: of policy and drafter, that they are about."""
        versions = None if self._versions is None else list(self._versions)
        return {
            "acceptance": self.acceptance.counters(),
            "costs": self.costs.counters(),
            "versions": versions,
        }

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.acceptance.restore(counters["acceptance"])
        self.costs.restore(counters["costs"])
        self._versions = None if counters["versions"] is None else tuple(counters["versions"])
        self._chosen_for = None


def _levels(strategy: Strategy, outcome: StepOutcome) -> float:
    """Returns the levels that were drafted: of the longest chain that follows no reference."""
    followed = outcome.from_reference or (False,) * len(outcome.drafted)
    own = [num for num, is_followed in zip(outcome.drafted, followed, strict=True) if not is_followed]
    return float(strategy.depth if strategy.width > 1 else max(own, default=0))


def _trial(predictions: Sequence[Prediction], best: Prediction, num_left: float) -> Prediction | None:
    """Returns the arm that is worth a trial; None: none is."""
    seconds_left = num_left / best.low
    found, smallest = None, math.inf
    for one in predictions:
        if one is best or one.deviation == 0.0:
            continue
        loss = one.once + TRIALS * one.seconds * (1 - one.low / best.low)
        still = CAUTION * math.sqrt(max(one.doubt**2 - one.deviation**2, 0.0))
        gain = seconds_left * expected_saving(math.log(one.speed / best.low) - still, one.deviation)
        may_lose = one.speed > CLEARLY * best.low or loss < MOST_LOST * seconds_left
        if gain > loss and may_lose and loss < smallest:
            found, smallest = one, loss
    return found


def expected_saving(mean: float, deviation: float) -> float:
    """Returns E[max(0, 1 - exp(-x))] for a normal x: the share of the time that is saved by an arm whose
    speed, over the best one's, has the logarithm x, where it is not used unless it is faster."""
    place = mean / deviation
    below = -deviation + place
    return _normal(place) - math.exp(deviation**2 / 2 - mean) * _normal(below)


def _normal(place: float) -> float:
    """Returns the distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-place / math.sqrt(2))
