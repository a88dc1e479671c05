"""The choice among the uses of idle time, by worth: seconds by which a step gets shorter for each second that
a rank spends on a use.

    worth(ahead) = seconds won / tokens offered to a step · tokens generated ahead / second / ranks at work
                   - cost(ahead)
    worth(train) = Δacceptance / (1 + acceptance) · rollout seconds · horizon / seconds trained
                   - cost(train) - publication seconds / seconds trained

slowdown.py estimates the costs. Everything is measured, phase by phase. A worthless use is still tried now
and then, because its worth may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tlt.accounts import IdleUse
from tlt.rollout.slowdown import Slowdown, SlowdownSums

REST_SECONDS = 0.2
"""Length of a rest: some tens of engine steps of a small model, a few of a large one."""
TRIAL_EVERY = 8
"""One phase in so many, the first among them, tries what is worth nothing, and puts what is worth most
behind the others."""
TRAINING_HORIZON = 10
"""Steps for which a step's training of the drafter is taken to last, at most: the policy moves on, and a
drafter that is not trained falls behind by as much as a step's training makes up."""

_FADE = 0.8
"""The weight of older phases, per phase."""
_RESTS = ((0.05, 1 / 4), (0.025, 1 / 8), (0.0, 1 / 32))
"""The share of idle time that ranks rest, by the standard deviation of the cost that is known least well."""
_PRIOR_WON, _PRIOR_TOKENS = 0.3, 500.0
"""Seconds won by a second of generating ahead, for one rank at work, and the tokens that this guess counts
for."""
_PRIOR_TRAINING, _PRIOR_CHECKS = 0.1, 2.0
"""Seconds won by a second of the drafter's training, and the measurements that this guess counts for."""


@dataclass(frozen=True)
class IdlePlan:
    """What ranks without work do in a phase.

    order: what is done first where there is something to do.
    rest: share of idle time in which a rank rests, to measure.
    offset: where in its first turn of work and rest a phase begins, as a share of it.
    """

    order: tuple[IdleUse, ...] = (IdleUse.AHEAD, IdleUse.TRAIN)
    rest: float = 0.0
    offset: float = 0.0

    def rests(self, idle_seconds: float) -> bool:
        """Returns whether a rank rests that has been idle for so many seconds of the phase."""
        if not self.rest:
            return False
        turn = REST_SECONDS / self.rest
        return (idle_seconds + self.offset * turn) % turn >= turn - REST_SECONDS


@dataclass(frozen=True)
class IdleFacts:
    """What a phase says of its idle time and of what earlier idle time has brought, all ranks together.

    ahead_tokens, ahead_seconds: generated ahead.
    offered_tokens: generated ahead for this step before.
    won_seconds: rank-seconds that following references has saved (EngineStats); None: no tuner says what else
        there was.
    rollout_seconds: of the phase.
    busy_ranks: rank-seconds at work / rollout_seconds.
    train_seconds: rank-seconds of drafter training.
    publish_seconds: that its end took.
    acceptance_before, acceptance: of the drafter, without and with it; NaN.
    steps_left: further policy steps of the run.
    """

    ahead_tokens: int
    ahead_seconds: float
    offered_tokens: int
    won_seconds: float | None
    rollout_seconds: float
    busy_ranks: float
    train_seconds: float
    publish_seconds: float
    acceptance_before: float
    acceptance: float
    steps_left: float

    @property
    def training_gain(self) -> float | None:
        """Seconds won by a second of training, at least: a verification brings 1 + acceptance tokens if
        one is drafted. Longer drafts gain more, but never as much as a chain of independent tokens would.
        None: not measured."""
        if not self.train_seconds or math.isnan(self.acceptance_before):
            return None
        change = (self.acceptance - self.acceptance_before) / (1 + self.acceptance)
        return (
            change
            * self.rollout_seconds
            * min(TRAINING_HORIZON, max(self.steps_left, 0))
            / self.train_seconds
        )


@dataclass
class _Sums:
    """Sums over phases, of which older ones have faded; beside a guess, only where a phase had something
    to add."""

    ahead_tokens: float = 0.0
    ahead_seconds: float = 0.0
    offered_tokens: float = 0.0
    won_seconds: float = 0.0
    rollout_seconds: float = 0.0
    busy_seconds: float = 0.0
    train_seconds: float = 0.0
    publish_seconds: float = 0.0
    training_gain: float = 0.0
    checks: float = 0.0

    def add(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self, name, _FADE * getattr(self, name) + value)


@dataclass(frozen=True)
class Worth:
    """Seconds by which a step becomes shorter, and longer, for every second that a rank spends on a use.

    deviation: of the cost, which counts as far as it is sure.
    """

    gain: float
    cost: float
    deviation: float = 0.0

    @property
    def net(self) -> float:
        return self.gain - max(self.cost - self.deviation, 0.0)


class IdleChoice:
    """Decides how ranks without work spend their time.

    uses: those that there are, in the order in which they come where they are not compared.
    compares: whether the one that is worth most comes first. If not, generating ahead is done whatever it is
        worth.
    has_neighbours: whether any machine has several ranks, so that one may slow another.
    """

    def __init__(self, uses: Sequence[IdleUse], compares: bool, has_neighbours: bool) -> None:
        self.uses, self.compares, self.has_neighbours = tuple(uses), compares, has_neighbours
        self.slowdown = Slowdown()
        self._sums = _Sums()

    def observe(self, facts: IdleFacts, slowdown: SlowdownSums) -> None:
        """Takes a phase into account."""
        self.slowdown.observe(slowdown)
        s = self._sums
        s.add(rollout_seconds=facts.rollout_seconds, busy_seconds=facts.busy_ranks * facts.rollout_seconds)
        s.add(ahead_tokens=facts.ahead_tokens, ahead_seconds=facts.ahead_seconds)
        s.add(train_seconds=facts.train_seconds, publish_seconds=facts.publish_seconds)
        if facts.offered_tokens and facts.won_seconds is not None:
            s.add(offered_tokens=facts.offered_tokens, won_seconds=facts.won_seconds)
        if (gain := facts.training_gain) is not None:
            s.add(training_gain=gain, checks=1)

    def worth(self) -> dict[IdleUse, Worth]:
        """Returns what every use is worth, by what is known so far."""
        costs, s = self.slowdown.costs(), self._sums
        gains = {IdleUse.AHEAD: self._gain_ahead(), IdleUse.TRAIN: self._gain_of_training()}
        ends = {
            IdleUse.AHEAD: 0.0,
            IdleUse.TRAIN: s.publish_seconds / s.train_seconds if s.train_seconds else 0.0,
        }
        return {
            use: Worth(gains[use], max(costs[use].mean, 0.0) + ends[use], costs[use].deviation)
            for use in self.uses
        }

    def _gain_ahead(self) -> float:
        s = self._sums
        speed = s.ahead_tokens / s.ahead_seconds if s.ahead_tokens else 0.0
        won = (s.won_seconds * speed + _PRIOR_WON * _PRIOR_TOKENS) / (s.offered_tokens + _PRIOR_TOKENS)
        ranks_at_work = max(s.busy_seconds / s.rollout_seconds, 1.0) if s.rollout_seconds else 1.0
        return won / ranks_at_work

    def _gain_of_training(self) -> float:
        s = self._sums
        return (s.training_gain + _PRIOR_TRAINING * _PRIOR_CHECKS) / (s.checks + _PRIOR_CHECKS)

    def plan(self, step: int) -> IdlePlan:
        """Returns the plan of a policy step."""
        worth, is_trial = self.worth(), step % TRIAL_EVERY == 0
        order = list(self.uses)
        if self.compares:
            order.sort(key=lambda use: worth[use].net, reverse=not is_trial)
        order = [
            use
            for use in order
            if is_trial or worth[use].net > 0 or (use is IdleUse.AHEAD and not self.compares)
        ]
        return IdlePlan(tuple(order), self._rest(), (step * 0.618) % 1.0)

    def _rest(self) -> float:
        if not (self.has_neighbours and self.uses):
            return 0.0
        costs = self.slowdown.costs()
        least_known = max(costs[use].deviation for use in self.uses)
        return next(share for deviation, share in _RESTS if least_known >= deviation)

    def counters(self) -> dict[str, Any]:
        """Returns what is known, as JSON."""
        return {"sums": asdict(self._sums), "slowdown": self.slowdown.counters()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned."""
        self._sums = _Sums(**counters["sums"])
        self.slowdown.restore(counters["slowdown"])
