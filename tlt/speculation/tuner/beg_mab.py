"""The tuner of the TLT paper (arXiv 2511.16665): a bucketed epsilon-greedy multi-armed bandit, BEG-MAB.

    batch size ─▶ bucket ─┬─ epsilon ───▶ a random arm of the bucket
                          └─ otherwise ─▶ the arm whose latest rewards have the highest median

A bucket is a range of batch sizes; arms of larger batches verify fewer tokens.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner

_BUCKETS = ((1, 9, 64), (2, 5, 16), (5, 3, 8), (21, 1, 4))
"""Smallest batch size, as in the paper's code; fewest and most tokens verified."""


class BegMab(StrategyTuner):
    """Rewards are the paper's: (accepted per request + 1) x batch size / seconds.

    groups: (smallest batch size, arms) of each bucket, in rising order.
    epsilon: share of engine steps that run a random arm.
    window: rewards remembered per arm.

    Arms without a reward are tried first. Rewards of older policies or drafters leave by the window alone.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, Sequence[Strategy]]],
        *,
        epsilon: float = 0.1,
        window: int = 300,
        rng: random.Random | None = None,
    ) -> None:
        assert groups[0][0] == 1, "the first bucket starts at batch size 1"
        self.groups, self.epsilon, self.rng = groups, epsilon, rng or random.Random(0)
        self.rewards: dict[tuple[int, Strategy], deque[float]] = {
            (bucket, arm): deque(maxlen=window) for bucket, (_, arms) in enumerate(groups) for arm in arms
        }

    def choose(self, batch: BatchState) -> Choice:
        return Choice(self.decide(self.bucket(batch), self.rng.random(), self.rng.random()))

    def bucket(self, batch: BatchState) -> int:
        return max(i for i, (smallest, _) in enumerate(self.groups) if smallest <= batch.num_running)

    def decide(self, bucket: int, explore: float, pick: float) -> Strategy:
        """`explore` and `pick` are uniform on [0, 1)."""
        arms = self.groups[bucket][1]
        if explore < self.epsilon:
            return arms[int(pick * len(arms))]
        for arm in arms:
            if not self.rewards[bucket, arm]:
                return arm
        return max(arms, key=lambda arm: statistics.median(self.rewards[bucket, arm]))

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        rewards = self.rewards.get((self.bucket(batch), strategy))
        # the engine may have had to decode plainly, or have drafted by another arm meanwhile
        if rewards is not None and outcome.drafted_next is None:
            mean_accepted = sum(outcome.accepted) / len(outcome.accepted) if outcome.accepted else 0.0
            rewards.append((mean_accepted + 1) * batch.num_running / outcome.seconds)

    def counters(self) -> dict[str, Any]:
        version, state, gauss = self.rng.getstate()
        rewards = [[bucket, str(arm), list(seen)] for (bucket, arm), seen in self.rewards.items()]
        return {"rewards": rewards, "rng": [version, list(state), gauss]}

    def restore(self, counters: Mapping[str, Any]) -> None:
        for bucket, arm, seen in counters["rewards"]:
            if (key := (bucket, Strategy.parse(arm))) in self.rewards:
                self.rewards[key].extend(seen)
        version, state, gauss = counters["rng"]
        self.rng.setstate((version, tuple(state), gauss))


def groups_of(arms: Sequence[Strategy]) -> list[tuple[int, list[Strategy]]]:
    """Off is in the last two buckets. No arm uses references: a batch may have none. A bucket for which all
    arms are too small has the two largest."""
    drafting = [arm for arm in arms if not (arm.is_off or arm.uses_references)]
    drafting.sort(key=lambda arm: -arm.budget)
    groups = []
    for smallest, least, most in _BUCKETS:
        off = [Strategy.OFF] if smallest >= 5 else []
        fitting = [arm for arm in drafting if least <= arm.budget <= most]
        groups.append((smallest, off + (fitting or drafting[:2])))
    return groups
