"""The choice among the uses of idle time, by worth: seconds by which a step gets shorter for each second
spent.

    worth(ahead) = seconds won / tokens offered to a step · tokens generated ahead / second / ranks at work
                   - cost(ahead)
    worth(train) = Δacceptance / (1 + acceptance) · rollout seconds · horizon / seconds trained
                   - cost(train) - publication seconds / seconds trained

A worthless use is tried now and then, because its worth may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tlt.base.records import IdleUse
from tlt.training.idle.slowdown import Slowdown, SlowdownSums

REST_SECONDS = 0.2
"""Some tens of engine steps of a small model, a few of a large one."""
TRIAL_EVERY = 8
"""The first of this many phases is a trial: worthless uses run too, and the most valuable use comes last."""
TRAINING_HORIZON = 10
"""Most steps that profit from one step's training of the drafter, because the policy moves on."""

_FADE = 0.8
_RESTS = ((0.05, 1 / 4), (0.025, 1 / 8), (0.0, 1 / 32))
"""(standard deviation, share of idle time to rest): the first row that the most uncertain cost reaches
counts."""
_PRIOR_WON, _PRIOR_TOKENS = 0.3, 500.0
"""Prior for generating ahead: seconds won per second with one busy rank, and its weight in tokens."""
_PRIOR_TRAINING, _PRIOR_CHECKS = 0.1, 2.0
"""Prior for training the drafter: seconds won per second, and its weight in measurements."""


@dataclass(frozen=True)
class IdlePlan:
    """rest: share of idle time to rest, which measures the costs.
    offset: the phase's begin within its first turn of work and rest, as a share of the turn.
    """

    order: tuple[IdleUse, ...] = (IdleUse.AHEAD, IdleUse.TRAIN)
    rest: float = 0.0
    offset: float = 0.0

    def rests(self, idle_seconds: float) -> bool:
        if not self.rest:
            return False
        turn = REST_SECONDS / self.rest
        return (idle_seconds + self.offset * turn) % turn >= turn - REST_SECONDS


@dataclass(frozen=True)
class IdleFacts:
    """Sums over ranks.

    offered_tokens: generated ahead for this step by earlier phases.
    won_seconds: rank-seconds saved by references (EngineStats); None: no tuner predicts the alternative.
    busy_ranks: rank-seconds at work / rollout_seconds.
    acceptance_before: without this training; NaN: not measured.
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
        """Seconds won by a second of training; None: not measured. A lower bound: verifying one drafted token
        brings 1 + acceptance tokens."""
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
    """Seconds by which a step gets shorter (gain) and longer (cost) for each second spent."""

    gain: float
    cost: float
    deviation: float = 0.0

    @property
    def net(self) -> float:
        """Gain minus the cost that is certain."""
        return self.gain - max(self.cost - self.deviation, 0.0)


class IdleChoice:
    """uses: in the order without comparison.
    compares: the most valuable use comes first; else ranks generate ahead whatever it is worth.
    has_neighbours: some machine has several ranks.
    """

    def __init__(self, uses: Sequence[IdleUse], compares: bool, has_neighbours: bool) -> None:
        self.uses, self.compares, self.has_neighbours = tuple(uses), compares, has_neighbours
        self.slowdown = Slowdown()
        self._sums = _Sums()

    def observe(self, facts: IdleFacts, slowdown: SlowdownSums) -> None:
        self.slowdown.observe(slowdown)
        s = self._sums
        s.add(
            rollout_seconds=facts.rollout_seconds,
            busy_seconds=facts.busy_ranks * facts.rollout_seconds,
            ahead_tokens=facts.ahead_tokens,
            ahead_seconds=facts.ahead_seconds,
            train_seconds=facts.train_seconds,
            publish_seconds=facts.publish_seconds,
        )
        if facts.offered_tokens and facts.won_seconds is not None:
            s.add(offered_tokens=facts.offered_tokens, won_seconds=facts.won_seconds)
        if (gain := facts.training_gain) is not None:
            s.add(training_gain=gain, checks=1)

    def worth(self) -> dict[IdleUse, Worth]:
        costs, s = self.slowdown.costs(), self._sums
        publication = s.publish_seconds / s.train_seconds if s.train_seconds else 0.0
        training = (s.training_gain + _PRIOR_TRAINING * _PRIOR_CHECKS) / (s.checks + _PRIOR_CHECKS)
        of_use = {IdleUse.AHEAD: (self._gain_ahead(), 0.0), IdleUse.TRAIN: (training, publication)}
        worth = {}
        for use in self.uses:
            gain, extra = of_use[use]
            worth[use] = Worth(gain, max(costs[use].mean, 0.0) + extra, costs[use].deviation)
        return worth

    def _gain_ahead(self) -> float:
        s = self._sums
        speed = s.ahead_tokens / s.ahead_seconds if s.ahead_tokens else 0.0
        won = (s.won_seconds * speed + _PRIOR_WON * _PRIOR_TOKENS) / (s.offered_tokens + _PRIOR_TOKENS)
        busy_ranks = max(s.busy_seconds / s.rollout_seconds, 1.0) if s.rollout_seconds else 1.0
        return won / busy_ranks

    def plan(self, step: int) -> IdlePlan:
        worth, is_trial = self.worth(), step % TRIAL_EVERY == 0
        order = list(self.uses)
        if self.compares:
            order.sort(key=lambda use: worth[use].net, reverse=not is_trial)
        order = [
            use
            for use in order
            if is_trial or worth[use].net > 0 or (use is IdleUse.AHEAD and not self.compares)
        ]
        rest = 0.0
        if self.has_neighbours and self.uses:
            least_known = max(one.deviation for one in worth.values())
            rest = next(share for deviation, share in _RESTS if least_known >= deviation)
        return IdlePlan(tuple(order), rest, (step * 0.618) % 1.0)

    def counters(self) -> dict[str, Any]:
        return {"sums": asdict(self._sums), "slowdown": self.slowdown.counters()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self._sums = _Sums(**counters["sums"])
        self.slowdown.restore(counters["slowdown"])
