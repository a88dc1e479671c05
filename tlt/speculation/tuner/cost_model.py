"""The tuner that predicts the speed of every arm from measured seconds and measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(rows of the forward, drafting)
                             └ acceptance.py               └ step_costs.py

It chooses the arm with the least time for the tokens left. A batch takes as long as its slowest sequence
(frailty.py). Speculation must never be slower than off, so it is rated CAUTION standard deviations below its
expected speed. Other arms are tried while that pays (trial.py). Retrieval is judged in hindsight, without
drafting: tokens do not depend on the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.acceptance import AcceptanceModel, Curve
from tlt.speculation.tuner.expectation import Array
from tlt.speculation.tuner.frailty import Frailties, speeds_to_finish, tokens_of
from tlt.speculation.tuner.protocol import (
    BatchState,
    ExpectedSpeeds,
    PrefillTime,
    ShadowDraft,
    StepOutcome,
    StrategyTuner,
)
from tlt.speculation.tuner.step import Step
from tlt.speculation.tuner.step_costs import UNKNOWN, CostPrior, StepCosts, StepWork, uses
from tlt.speculation.tuner.trial import CAUTION, TRIALS, Prediction, find_trial

MARGIN = 0.03
"""Lead over off that speculation needs where sequences are unknown: uneven progress leaves small batches."""
NUM_FIRST = 3
"""Steps of off before anything else; the first, of a new shape, is not typical."""
MIN_RETRIEVED = 1.05
"""Tokens per verification in hindsight from which on retrieval drafts."""
HORIZON_SECONDS = 300.0
"""A trial must pay within this time: later the batch is different."""
DECIDE_EVERY, DECIDE_AFTER = 0.1, 0.2
"""Engine seconds between decisions for about the same batch, unless an arm is on trial; at first a share
of all seconds so far. A decision costs up to 2 ms, as the forward evicts its data from the processor's
caches."""
MUCH_THE_SAME = 1 / 8
"""Relative change of the batch size that needs a new decision."""


class CostModel(StrategyTuner):
    """has_shadow_drafts: False: retrieval is tried like any drafter."""

    def __init__(
        self,
        arms: Sequence[Strategy],
        *,
        prior: CostPrior = UNKNOWN,
        has_shadow_drafts: bool = True,
    ) -> None:
        assert Strategy.OFF in arms, "off is always an arm"
        self.arms = tuple(arms)
        self.has_shadow_drafts = has_shadow_drafts
        self.acceptance, self.costs = AcceptanceModel(), StepCosts(prior)
        self.frailties = Frailties()
        self._survivals: dict[Curve, Array] = {}
        """By depth, at the last decision; the curves have no octave."""
        self._choice = Strategy.OFF
        self._chosen_for: tuple[int, bool] | None = None
        """Batch size, and whether there were references; None: decide anew."""
        self._seconds_since = self._seconds = 0.0
        """Engine seconds since the last decision, and in all."""
        self._rest, self._is_trial = 0.0, False
        """Engine seconds until the next decision; whether an arm is on trial."""
        self._versions: tuple[int, int] | None = None
        self._unread = 0.0
        """Tokens per sequence that the learned drafter has not read, on average."""
        self._narrowed: dict[tuple[bool, bool, bool], tuple[Strategy, ...]] = {}
        self._known: set[tuple[int, Strategy]] = set()
        self._steps: list[Step] = []
        """Since the last decision."""
        self._prefill_time: PrefillTime | None = None

    def choose(self, batch: BatchState) -> Strategy:
        versions = (batch.policy_version, batch.drafter_version)
        if versions != self._versions:
            self.learn()
            if self._versions is not None:
                self.acceptance.age()
            self._versions, self._chosen_for = versions, None
        if batch.prefill_time is not None and batch.prefill_time is not self._prefill_time:
            self._prefill_time = batch.prefill_time
            self.costs.observe_prefill(*batch.prefill_time)
        if self._is_another(batch) or self._seconds_since >= self._rest:
            predictions, choice = self.decide(batch)
            self._choice, self._seconds_since = choice.strategy, 0.0
            self._chosen_for = batch.num_running, bool(batch.reference_drafts)
            self._rest = min(DECIDE_EVERY, DECIDE_AFTER * self._seconds)
            if self._is_trial:
                self._rest = min(self._rest, choice.once + TRIALS * choice.seconds)
            if self.costs.num_steps:
                others = max(p.now for p in predictions if not p.strategy.uses_references)
                otherwise = others if choice.strategy.uses_references else None
                self.expected = ExpectedSpeeds(choice.now, otherwise)
        return self._choice

    def _is_another(self, batch: BatchState) -> bool:
        size, had_references = self._chosen_for or (0, False)
        is_resized = abs(batch.num_running - size) > MUCH_THE_SAME * size
        return is_resized or bool(batch.reference_drafts) != had_references

    def decide(self, batch: BatchState) -> tuple[list[Prediction], Prediction]:
        """Learns, then predicts all arms that may run. Returns also the prediction of the arm to run."""
        self.learn()
        arms, size = self._candidates(batch), batch.num_running
        self._look_at_sequences(arms, batch)
        last = replace(batch, num_running=1, num_admitted=0, reference_drafts=())
        works = [self._work(arm, one) for one in (batch, last) for arm in arms]
        cost, last_A = self.costs.forecast(works).split(len(arms))
        expected = self.acceptance.expected(arms, size, batch.reference_drafts)
        tokens_AMB = self._tokens_of_each(arms, batch)
        now_A = speed_A = size * expected.tokens_A / cost.seconds_A
        if knows_progress := bool(self._survivals) and batch.num_left is not None:
            speed_A = speeds_to_finish(batch, tokens_AMB, now_A, cost.seconds_A, last_A)
        num_left = math.inf if batch.num_left is None else size * batch.num_left
        num_left = min(num_left, HORIZON_SECONDS * float(speed_A.max()))
        off = arms.index(Strategy.OFF)
        sd_vs_off_A = np.sqrt(self.costs.variance(cost.shares_AP, off) + (expected.spread_AR**2).sum(1))
        low_A = speed_A * np.exp(-CAUTION * sd_vs_off_A)
        seconds_A = cost.once_A + num_left / low_A
        if not knows_progress:
            seconds_A[off] /= 1 + MARGIN
        best = int(seconds_A.argmin())
        variance_A = self.costs.variance_removed(cost.shares_AP, best, TRIALS)
        variance_A = variance_A + expected.variance_removed(best, TRIALS * size)
        columns = (now_A, speed_A, low_A, sd_vs_off_A, np.sqrt(variance_A), cost.seconds_A, cost.once_A)
        predictions = list(map(Prediction, arms, *(column.tolist() for column in columns)))
        choice, trial = predictions[off], None
        if self.costs.num_steps.get(Strategy.OFF, 0) >= NUM_FIRST:
            trial = find_trial(predictions, predictions[best], num_left)
            choice = trial or predictions[best]
        self._is_trial = trial is not None
        return predictions, choice

    def _look_at_sequences(self, arms: Sequence[Strategy], batch: BatchState) -> None:
        self._survivals.clear()
        if not batch.sequences or batch.reference_drafts:
            return
        self.frailties.keep([one.name for one in batch.sequences])
        for arm in arms:
            if (curve := Curve.of(arm, None)) not in self._survivals:
                self._survivals[curve] = self.acceptance.survivals(arm, batch.num_running)

    def _tokens_of_each(self, arms: Sequence[Strategy], batch: BatchState) -> Array:
        """Draws of each sequence's tokens per verification, [A, M, B]; M = 0: sequences unknown."""
        if not self._survivals:
            return np.empty((len(arms), 0, 0))
        drawn_MB = self.frailties.draw([one.name for one in batch.sequences])
        tables = {curve: tokens_of(survivals_D) for curve, survivals_D in self._survivals.items()}
        tokens_AMB = np.empty((len(arms), *drawn_MB.shape))
        for i, arm in enumerate(arms):
            tokens_AMB[i] = tables[Curve.of(arm, None)][drawn_MB, arm.depth]
        return tokens_AMB

    def _candidates(self, batch: BatchState) -> tuple[Strategy, ...]:
        """References need a reference to exist, and retrieval must pay. Rates of trees and the hybrid rest on
        learned chains, which are measured first."""
        retrieved = self.acceptance.tokens(ShadowDraft.STRATEGY, batch.num_running)
        is_retrieval_worth = not self.has_shadow_drafts or retrieved > MIN_RETRIEVED
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

    def _work(self, arm: Strategy, batch: BatchState) -> StepWork:
        size = batch.num_running
        nodes, levels = self.acceptance.drafted(arm, size, batch.reference_drafts)
        unread = self._unread * size + batch.num_admitted * batch.mean_length
        unread = min(unread, size * batch.mean_length)
        is_first = (size, arm) not in self._known
        return StepWork(arm, size, batch.mean_length, size * (1 + nodes), levels, unread, is_first)

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self._seconds_since += outcome.seconds
        self._seconds += outcome.seconds
        self._steps.append(Step(strategy, batch, outcome))

    def learn(self) -> None:
        steps, self._steps = self._steps, []
        for _, group in groupby(steps, Step.kind):
            alike = list(group)
            self._learn_acceptance(alike)
            self._learn_costs(alike)

    def _learn_acceptance(self, alike: Sequence[Step]) -> None:
        strategy, size = alike[0].strategy, alike[0].batch.num_running
        names: list[Hashable] = []
        accepted: list[int] = []
        drafted: list[int] = []
        for _, batch, outcome in alike:
            self.acceptance.observe_shadow_drafts(batch.shadow_drafts, size)
            if strategy.uses_references and outcome.from_reference:
                self.acceptance.observe_without_reference(strategy, outcome)
            else:
                names += outcome.names or [None] * len(outcome.accepted)
                accepted += outcome.accepted
                drafted += outcome.drafted
        if accepted:
            survivals_D = self._survivals.get(Curve.of(strategy, None))
            if survivals_D is None:
                survivals_D = self.acceptance.survivals(strategy, size)
            self.frailties.observe(names, survivals_D, accepted, strategy.depth)
            self.acceptance.observe(strategy, accepted, drafted, size)

    def _learn_costs(self, alike: Sequence[Step]) -> None:
        works, seconds = [], []
        for step in alike:
            drafted, size = step.drafted, step.batch.num_running
            work = self._work(drafted, step.batch)
            work = work._replace(rows=size + sum(step.outcome.drafted), levels=step.levels)
            if work.is_first or (work.unread and uses(drafted)[0]):
                self.costs.observe([work], [step.outcome.seconds], step.is_typical)
            else:
                works.append(work)
                seconds.append(step.outcome.seconds)
            self._known.add((size, drafted))
            unread = min(work.unread + step.outcome.num_tokens, size * step.batch.mean_length)
            self._unread = 0.0 if uses(drafted)[0] else unread / size
        if works:
            self.costs.observe(works, seconds, alike[0].is_typical)

    def counters(self) -> dict[str, Any]:
        self.learn()
        versions = None if self._versions is None else list(self._versions)
        known = {"acceptance": self.acceptance.counters(), "costs": self.costs.counters()}
        return {**known, "versions": versions}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.acceptance.restore(counters["acceptance"])
        self.costs.restore(counters["costs"])
        self._versions = None if counters["versions"] is None else tuple(counters["versions"])
        self._chosen_for, self._steps = None, []
