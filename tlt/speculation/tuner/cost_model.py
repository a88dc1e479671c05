"""The tuner that predicts the speed of every strategy from measured seconds and measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(rows of the forward, cached tokens, drafting)
                             └ acceptance.py               └ step_costs.py

It takes the fastest, and off rather than what is only guessed to be faster. An arm that might be faster is
tried while trials have cost less than EXPLORE of all seconds: finding out that a drafter is useless costs no
more than that.

Axes: A arms · D depths (acceptance.py) · P parts of a step's seconds (step_costs.py)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.acceptance import AcceptanceModel
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner
from tlt.speculation.tuner.step_costs import NOISE, StepCosts

EXPLORE = 0.02
"""Share of all seconds that trials may cost."""
CAUTION = 0.3
"""An arm is taken for the fastest by its prediction less this many standard deviations against off."""
OPTIMISM = 1.5
"""An arm is worth a trial if it would be the fastest this many standard deviations above its prediction."""
MARGIN = 0.01
"""Lead over off that speculation needs."""
CHEAP = 0.02
"""Loss, in seconds of the cheapest step, below which trials are not told apart by their cost."""
NUM_FIRST = 3
"""Steps of off before anything else."""
CATCH_UP = 3.0
"""Factor of the noise of a step in which the drafter reads what it missed."""
MOST_CHARGED = 5.0
"""Times its prediction that a step on trial is charged at most: probably the machine was busy."""
MOST_HELD = 32
"""Most steps between two decisions for about the same batch, since one takes 0.2 ms. Each decision that
confirms the one before stands twice as long."""
MUCH_THE_SAME = 1 / 8
"""Relative change of the batch size that needs a new decision."""


class Decision(NamedTuple):
    choice: Choice
    seconds: float
    """Predicted for a step."""
    best: Strategy
    """Predicted to be the fastest; another one is on trial."""
    best_speed: float

    @property
    def is_trial(self) -> bool:
        return self.choice.strategy != self.best


class _Step(NamedTuple):
    strategy: Strategy
    drafted: Strategy
    batch_size: int
    noise: float
    outcome: StepOutcome
    num_cached: int


class CostModel(StrategyTuner):
    def __init__(self, arms: Sequence[Strategy]) -> None:
        self.arms, self._off = tuple(arms), arms.index(Strategy.OFF)
        self.acceptance, self.costs = AcceptanceModel(arms), StepCosts(arms)
        self._uses_references_A = np.array([arm.uses_references for arm in arms])
        self._is_hybrid_A = np.array([arm.drafter == "hybrid" for arm in arms])
        self.seconds = 0.0
        """Of all steps."""
        self.lost_seconds = 0.0
        """What trials took beyond the seconds of the fastest arm."""
        self._num_off = 0
        self._versions: tuple[int, int] | None = None
        self._decision: Decision | None = None
        self._decided_for = 0, False
        """Batch size, and whether there were references."""
        self._num_steps = 0
        """Steps since the decision."""
        self._hold = 0
        """Steps for which the decision stands, unless it is a trial."""
        self._steps: list[_Step] = []
        """Steps not learned from yet."""
        self._ran: set[Strategy] = set()
        self._previous = Strategy.OFF

    def choose(self, batch: BatchState) -> Choice:
        if self._num_off < NUM_FIRST:
            return Choice(Strategy.OFF)
        versions = batch.policy_version, batch.drafter_version
        if self._versions not in (None, versions):
            self.learn()
            self.acceptance.age()
            self._decision = None
        self._versions = versions
        size, had_references = self._decided_for
        is_another = abs(batch.num_running - size) > MUCH_THE_SAME * size
        is_another = is_another or bool(batch.reference_drafts) != had_references
        is_trial = self._decision is not None and self._decision.is_trial
        if self._decision is None or is_another or self._num_steps >= (1 if is_trial else self._hold):
            self.learn()
            before, self._decision = self._decision, self.decide(batch)
            is_confirmed = before is not None and before.best == self._decision.best
            self._hold = min(2 * self._hold, MOST_HELD) if is_confirmed else 1
            self._decided_for, self._num_steps = (batch.num_running, bool(batch.reference_drafts)), 0
        return self._decision.choice

    def decide(self, batch: BatchState) -> Decision:
        """A pure function of what was learned."""
        size = batch.num_running
        expected = self.acceptance.expected(size, batch.reference_drafts)
        cost = self.costs.forecast(size * (1 + expected.nodes_A), size, batch.num_cached)
        speed_A = np.where(self._can_run(batch), size * expected.tokens_A / cost.seconds_A, 1e-9)
        rated_A = speed_A.copy()
        rated_A[self._off] *= 1 + MARGIN

        def deviation_from(other: int) -> NDArray[np.float64]:
            """By arm: the standard deviation of log(its speed / another arm's)."""
            variance_A = self.costs.variance(cost.shares_AP, other)
            result: NDArray[np.float64] = np.sqrt(
                variance_A + self.acceptance.variance(expected.spread_AD, other)
            )
            return result

        chosen = best = int((rated_A * np.exp(-CAUTION * deviation_from(self._off))).argmax())
        lead_A = rated_A * np.exp(OPTIMISM * deviation_from(best)) / rated_A[best] - 1
        loss_A = cost.seconds_A * (1 - speed_A / speed_A[best]).clip(min=0.0)
        is_worth_A = (lead_A > 0) & (loss_A <= EXPLORE * self.seconds - self.lost_seconds)
        is_worth_A[best] = False
        if is_worth_A.any():
            gain_A = lead_A / (loss_A + CHEAP * cost.seconds_A.min())  # cheap trials first
            chosen = int(np.where(is_worth_A, gain_A, 0.0).argmax())
        otherwise = (
            float(speed_A[~self._uses_references_A].max()) if self._uses_references_A[chosen] else None
        )
        choice = Choice(self.arms[chosen], float(speed_A[chosen]), otherwise)
        return Decision(choice, float(cost.seconds_A[chosen]), self.arms[best], float(speed_A[best]))

    def _can_run(self, batch: BatchState) -> NDArray[np.bool]:
        """The hybrid is judged by the learned drafter's rates."""
        can_run_A = ~self._uses_references_A | bool(batch.reference_drafts)
        return can_run_A & (~self._is_hybrid_A | self.acceptance.is_learned_known)

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        drafted = outcome.drafted_next or strategy
        is_cold = drafted not in self._ran  # memory is allocated, kernels are compiled
        misses = bool(batch.num_admitted) or not _is_learned(self._previous)
        noise = CATCH_UP * NOISE if _is_learned(drafted) and misses else NOISE
        decision = self._decision
        if decision is not None and decision.is_trial and strategy == decision.choice.strategy:
            most = decision.seconds * (1.0 if is_cold else MOST_CHARGED)
            lost = min(outcome.seconds, most) - outcome.num_tokens / decision.best_speed
            self.lost_seconds += max(lost, 0.0)
        self.seconds += outcome.seconds
        self._num_off += strategy.is_off
        self._num_steps += 1
        self._ran.add(drafted)
        self._previous = drafted
        self._steps.append(
            _Step(
                strategy,
                drafted,
                batch.num_running,
                math.inf if is_cold else noise,
                outcome,
                batch.num_cached,
            )
        )

    def learn(self) -> None:
        """Consecutive steps of one kind count by their median."""
        steps, self._steps = self._steps, []
        for (strategy, drafted, size, noise), group in groupby(steps, lambda step: step[:4]):
            alike = list(group)
            outcomes = [step.outcome for step in alike]
            self.acceptance.fade(len(outcomes))
            for outcome in outcomes:
                self._learn_acceptance(strategy.without_reference, outcome)
            if drafted in self.arms and noise < math.inf:
                num, arm = len(outcomes), self.arms.index(drafted)
                rows = size + sum(sum(outcome.drafted) for outcome in outcomes) / num
                seconds = statistics.median(outcome.seconds for outcome in outcomes)
                num_cached = statistics.median(step.num_cached for step in alike)
                self.costs.observe(arm, size, rows, seconds, noise / math.sqrt(num), num, num_cached)

    def _learn_acceptance(self, drafting: Strategy, outcome: StepOutcome) -> None:
        """References know themselves how far they hold (`ReferenceDraft`)."""
        from_reference = outcome.from_reference or (False,) * len(outcome.accepted)
        rows = zip(outcome.accepted, outcome.drafted, from_reference, strict=True)
        own = [(accepted, drafted) for accepted, drafted, is_copied in rows if not is_copied]
        if own and not drafting.is_off:
            self.acceptance.observe(drafting, *map(list, zip(*own, strict=True)))

    def counters(self) -> dict[str, Any]:
        self.learn()
        return {
            "acceptance": self.acceptance.counters(),
            "costs": self.costs.counters(),
            "versions": self._versions and list(self._versions),
            "seconds": [self.seconds, self.lost_seconds],
            "num_off": self._num_off,
        }

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.acceptance.restore(counters["acceptance"])
        self.costs.restore(counters["costs"])
        self._versions = counters["versions"] and tuple(counters["versions"])
        self.seconds, self.lost_seconds = counters["seconds"]
        self._num_off, self._decision, self._steps = counters["num_off"], None, []


def _is_learned(strategy: Strategy) -> bool:
    return strategy.without_reference.drafter in ("learned", "hybrid")
