"""Tuners choose the strategy for the batch that is running now.

    Fixed        always the same
    BegMab       the bandit of the TLT paper (arXiv 2511.16665): per range of batch sizes, the arm with the best median reward
    CostModel    predicts from measured costs and measured acceptance, so that one arm informs its neighbours (cost_model.py)

A decision is a pure function of the statistics (`decide`); seconds come in with the outcomes, randomness as an argument. No
tuner reads a clock or knows an engine.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.tuning.cost_model import CostModel
from tlt.tuning.step_costs import UNKNOWN, CostPrior
from tlt.types import BatchState, StepOutcome, Strategy, StrategyTuner, UserError


class Fixed:
    """Chooses the same strategy for every batch."""

    predicted_speed = speed_otherwise = None

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def choose(self, batch: BatchState) -> Strategy:
        return self.strategy

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        """Learns nothing."""


class BegMab:
    """Chooses by the paper's bucketed epsilon-greedy multi-armed bandit.

    groups: (smallest batch size, arms) of each bucket, in rising order. A bucket is a range of batch sizes; its strategies
        verify about equally many tokens, the fewer the larger the batch.
    epsilon: share of engine steps that run a random arm of the bucket.
    window: rewards remembered per arm.  The reward is the paper's, (accepted per request + 1) x batch / seconds.

    An arm without a reward yet is tried first. Rewards of older policies or drafters leave through the window alone.
    """

    predicted_speed = speed_otherwise = None

    def __init__(
        self,
        groups: Sequence[tuple[int, Sequence[Strategy]]],
        *,
        epsilon: float = 0.1,
        window: int = 300,
        rng: random.Random | None = None,
    ) -> None:
        self.groups = sorted(groups, key=lambda group: group[0])
        assert self.groups[0][0] == 1, "the first group starts at batch size 1"
        self.epsilon = epsilon
        self.rng = rng or random.Random(0)
        self.rewards: dict[tuple[int, Strategy], deque[float]] = {
            (bucket, arm): deque(maxlen=window) for bucket, (_, arms) in enumerate(self.groups) for arm in arms
        }

    def choose(self, batch: BatchState) -> Strategy:
        return self.decide(self.bucket(batch), self.rng.random(), self.rng.random())

    def bucket(self, batch: BatchState) -> int:
        return max(i for i, (smallest, _) in enumerate(self.groups) if smallest <= batch.num_running)

    def decide(self, bucket: int, explore: float, pick: float) -> Strategy:
        """Returns the arm to run. `explore` and `pick` are uniform on [0, 1)."""
        arms = self.groups[bucket][1]
        if explore < self.epsilon:
            return arms[int(pick * len(arms))]
        for arm in arms:
            if not self.rewards[bucket, arm]:
                return arm
        return max(arms, key=lambda arm: statistics.median(self.rewards[bucket, arm]))

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        rewards = self.rewards.get((self.bucket(batch), strategy))
        if rewards is not None:  # the engine may have had to decode plainly
            mean_accepted = sum(outcome.accepted) / len(outcome.accepted) if outcome.accepted else 0.0
            rewards.append((mean_accepted + 1) * batch.num_running / outcome.seconds)

    def counters(self) -> dict[str, Any]:
        """Returns the rewards and the state of the random numbers, as JSON."""
        version, state, gauss = self.rng.getstate()
        rewards = [[bucket, str(arm), list(seen)] for (bucket, arm), seen in self.rewards.items()]
        return {"rewards": rewards, "rng": [version, list(state), gauss]}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned."""
        for bucket, arm, seen in counters["rewards"]:
            if (key := (bucket, Strategy.parse(arm))) in self.rewards:
                self.rewards[key].extend(seen)
        version, state, gauss = counters["rng"]
        self.rng.setstate((version, tuple(state), gauss))


def counters_of(tuner: StrategyTuner | None) -> dict[str, Any]:
    """Returns what a tuner has learned, as JSON; nothing of one that learns nothing."""
    return tuner.counters() if isinstance(tuner, BegMab | CostModel) else {}


def restore_tuner(tuner: StrategyTuner | None, counters: Mapping[str, Any]) -> None:
    """Gives a tuner what one of its kind had learned before a restart."""
    if isinstance(tuner, BegMab | CostModel):
        tuner.restore(counters)


# ── the arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_CHAINS = (1, 2, 3, 4, 6, 8, 11, 15)
_FOLLOWED = (32, 64, 128, 256)
_TREES = ((3, 2, 6), (5, 2, 10), (7, 2, 14), (6, 3, 24), (10, 4, 48))
_THRESHOLDS = (1, 2, 5, 21)
"""The batch sizes at which BEG-MAB goes to the next group, as in the paper's code."""


def default_arms(kinds: Sequence[str], max_depth: int = Strategy.MAX_DEPTH, trees: bool = True) -> tuple[Strategy, ...]:
    """Returns the strategies worth trying with drafters of these kinds: off, chains, long ones along references, and trees
    where candidates are ranked.

    max_depth, trees: how deep an engine can draft, and whether drafts may branch there.
    """
    arms = [Strategy.OFF]
    for kind in kinds:
        follows = Strategy(kind, 1, 1, 1).follows
        if "hybrid" in kinds and kind in ("ahead+learned", "ahead+ngram"):
            continue  # ahead+hybrid takes the better of the two
        depths = _FOLLOWED if follows else _CHAINS[3:] if kind == "hybrid" else _CHAINS
        arms += [Strategy(kind, depth, 1, depth) for depth in depths]
    if "learned" in kinds and trees:
        arms += [Strategy("learned", *shape) for shape in _TREES]
    return tuple(arm for arm in arms if arm.follows or arm.depth <= max_depth)


def default_groups(arms: Sequence[Strategy]) -> list[tuple[int, list[Strategy]]]:
    """Returns BEG-MAB's buckets: four groups of arms by the number of tokens to verify, which is largest for the smallest
    batches. Off is an arm of the last two. References are followed in none: a group has no arm for a batch without any."""
    speculating = sorted((arm for arm in arms if not (arm.is_off or arm.follows)), key=lambda arm: -arm.budget)
    limits = (64, 16, 8, 4)
    floors = (9, 5, 3, 1)
    groups: list[tuple[int, list[Strategy]]] = []
    for threshold, limit, floor in zip(_THRESHOLDS, limits, floors, strict=True):
        chosen = [arm for arm in speculating if floor <= arm.budget <= limit]
        groups.append((threshold, [*([Strategy.OFF] if threshold >= 5 else []), *chosen]))
    return groups


def make_tuner(
    speculation: str,
    kinds: Sequence[str],
    name: str = "cost-model",
    max_depth: int = Strategy.MAX_DEPTH,
    trees: bool = True,
    prior: CostPrior = UNKNOWN,
    has_hindsight: bool = True,
    acceptance: float | None = None,
) -> StrategyTuner | None:
    """Makes the tuner that the user asked for.

    speculation: `off`, `adaptive` or [drafter:]DEPTHxWIDTHxBUDGET. For `off` the result is None: nothing drafts.
    kinds: the drafters that exist, the preferred one first.  name: the tuner behind `adaptive`, cost-model or beg-mab.
    max_depth, trees: what the engine can draft (`default_arms`).  prior: the drafter's size beside the target's.
    has_hindsight: whether the engine says what retrieval would have drafted.
    acceptance: the rate that the learned drafter's folder records; None: none.
    Raises UserError for a strategy whose drafter does not exist.
    """
    if speculation == "off":
        return None
    if speculation != "adaptive":
        strategy = Strategy.parse(speculation, kinds[0])
        if strategy.is_off or strategy.drafter not in kinds:
            raise UserError(
                f"speculation: {speculation!r} needs a drafter of kind {strategy.drafter}; there is {', '.join(kinds)}"
            )
        return Fixed(strategy)
    arms = default_arms(kinds, max_depth, trees)
    if name == "beg-mab":
        return BegMab(default_groups(arms))
    assert name == "cost-model", name
    return CostModel(arms, prior=prior, has_hindsight=has_hindsight, acceptance=acceptance)
