"""A tuner that predicts: seconds of a step from measured seconds, tokens of a step from measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(batch, tokens in the forward, drafting)
                             └ Acceptance                  └ StepCosts
    choose the arm with the largest   log speed + bonus x standard deviation of its estimate

Every measurement informs its neighbours: acceptance is a survival curve shared by all depths of a drafter and by all batch
sizes; seconds are a Gaussian process over (batch, tokens in the forward, drafting work, length) in logarithms (Rasmussen &
Williams, ch. 2), and the bonus is that of GP-UCB (Srinivas et al., arXiv 0912.3995). So an arm that was never tried is tried
only where what is known leaves room for it to be the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt.types import BatchState, StepOutcome, Strategy

Array = NDArray[np.float64]

# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_PRIOR_HAZARD = 0.7
_PRIOR_COUNT = 1.5
_ACCEPTANCE_MEMORY = 4000.0  # verifications
_WORTH_AT_NEW_VERSION = 16.0
"""What was seen of an older policy or drafter counts as at most so many verifications: enough to start from, and little
enough that a drafter which has become better, or worse, is soon found out."""


class Acceptance:
    """P(the walk survives to depth d), from how far walks came. One curve per drafter for chains and one per tree shape; a
    depth seen rarely leans on the one before it, a tree on the chain."""

    def __init__(self) -> None:
        self.tried: dict[tuple[str, int, int], Array] = {}
        self.survived: dict[tuple[str, int, int], Array] = {}

    @staticmethod
    def key(strategy: Strategy) -> tuple[str, int, int]:
        return (strategy.drafter, 1, 0) if strategy.width == 1 else (strategy.drafter, strategy.width, strategy.budget)

    def observe(self, strategy: Strategy, accepted: Sequence[int]) -> None:
        key = self.key(strategy)
        if key not in self.tried:
            self.tried[key], self.survived[key] = np.zeros(Strategy.MAX_DEPTH), np.zeros(Strategy.MAX_DEPTH)
        fade = math.exp(-len(accepted) / _ACCEPTANCE_MEMORY)
        came_B = np.minimum(np.asarray(accepted), strategy.depth)
        exactly = np.bincount(came_B, minlength=strategy.depth + 1)
        reached = exactly[::-1].cumsum()[::-1]  # walks that came to depth d or further
        self.tried[key] *= fade
        self.survived[key] *= fade
        self.tried[key][: strategy.depth] += reached[: strategy.depth]
        self.survived[key][: strategy.depth] += reached[1 : strategy.depth + 1]

    def age(self, worth: float = _WORTH_AT_NEW_VERSION) -> None:
        for key, tried in self.tried.items():
            keep = min(worth / max(tried[0], worth), 1.0)
            tried *= keep
            self.survived[key] *= keep

    def hazards(self, strategy: Strategy) -> tuple[Array, Array]:
        """P(accepted at depth d | came so far) and the number of observations behind it, for d = 1 .. depth."""
        key, depth = self.key(strategy), strategy.depth
        if strategy.width == 1:
            prior = np.full(depth, -1.0)
        else:  # as if further candidates were worth what they are on average (DESIGN §2: 0.73, 0.85, 0.92 for 1, 2, 4)
            chain, _ = self.hazards(Strategy(strategy.drafter, depth, 1, depth))
            prior = 1.0 - (1.0 - chain) ** math.sqrt(strategy.width)
        tried, survived = self.tried.get(key), self.survived.get(key)
        if tried is None or survived is None:
            tried = survived = np.zeros(Strategy.MAX_DEPTH)
        result, before = np.empty(depth), _PRIOR_HAZARD
        for d in range(depth):
            expected = before if prior[d] < 0 else prior[d]
            result[d] = before = (survived[d] + _PRIOR_COUNT * expected) / (tried[d] + _PRIOR_COUNT)
        return result, tried[:depth] + _PRIOR_COUNT

    def expected_tokens(self, arms: Sequence[Strategy]) -> tuple[Array, Array]:
        """Tokens per verification, the bonus token included, per arm; and the variance of their logarithms."""
        tokens_A, variance_A = np.ones(len(arms)), np.zeros(len(arms))
        deepest: dict[tuple[str, int, int], Strategy] = {}
        for arm in arms:
            key = self.key(arm)
            if not arm.is_off and (key not in deepest or arm.depth > deepest[key].depth):
                deepest[key] = arm
        curves = {key: self.hazards(arm) for key, arm in deepest.items()}  # a shallower arm's curve is its beginning
        for i, arm in enumerate(arms):
            if not arm.is_off:
                hazard, counts = (values[: arm.depth] for values in curves[self.key(arm)])
                survival = hazard.cumprod()
                tokens_A[i] += survival.sum()
                beyond = survival[::-1].cumsum()[::-1] / tokens_A[i]  # what hangs on each depth
                hazard = hazard.clip(1e-3, 1 - 1e-3)
                variance_A[i] = (beyond**2 * (1 - hazard) / (hazard * counts)).sum()
        return tokens_A, variance_A


# ── seconds ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NOISE = 0.15
"""Standard deviation of one step's log seconds about its mean."""
_FLOOR = 0.02
"""What many measurements of a cell still leave open: costs drift."""
_MEMORY = 100.0
"""Measurements that a cell's mean spans."""
_FORGET_STEPS = 4000.0
"""Engine steps after which what a cell knew counts for 1/e."""
_MAX_OUTLIER = 3.0
"""A step this many times slower than its cell's mean is counted as this many."""
_SURPRISE, _WEIGHT_OF_SURPRISE = 1.5, 0.2
"""A step so many times slower than predicted says little as long as its arm was hardly tried: most likely memory was
allocated, or the machine was busy."""
_HALF_ROWS = 32.0
"""Prior: a forward of n tokens costs as much as n + 32, roughly what it takes before weights stop dominating."""
_DRAFT_COST = 0.06
"""Prior: one drafting step costs this share of a forward."""
_MAX_NEIGHBOURS = 48

_SLOPES = np.array([0.4, 0.3, 0.3, 0.3, 0.2, 0.2])
"""Prior standard deviations of log seconds per unit of each feature, about the prior's mean."""
_BEND, _LENGTHS = 0.15, np.array([1.5, 1.0, 1.0, 2.0, 1.0, 1.0])
"""Amplitude and length scales of what is not linear."""


def _features(batch_size: float, mean_length: float, strategy: Strategy) -> Array:
    """log2 of batch, of tokens in the forward, of drafting work and of length; whether each kind of drafter runs."""
    learned = float(not strategy.is_off and strategy.drafter != "ngram")
    retrieved = float(strategy.drafter in ("ngram", "hybrid"))
    rows = batch_size * (1 + strategy.budget)
    work = learned * _draft_work(strategy)
    return np.array(
        [math.log2(batch_size), math.log2(rows), math.log2(1 + work), math.log2(mean_length / 256), learned, retrieved]
    )


def _draft_work(strategy: Strategy) -> float:
    return strategy.depth * (1 + (strategy.width - 1) / 4)


def _prior_log_seconds(batch_size: float, strategy: Strategy) -> float:
    """Up to a constant."""
    learned = strategy.drafter != "ngram"
    drafting = 1 + _DRAFT_COST * _draft_work(strategy) * learned
    return math.log((_HALF_ROWS + batch_size * (1 + strategy.budget)) * drafting)


@dataclass
class _Cell:
    """Measurements of one arm at nearly one batch size and length."""

    features: Array
    prior: float
    seconds: float = 0.0
    count: float = 0.0
    step: int = 0


class StepCosts:
    """Seconds of an engine step, as a Gaussian process over the logarithm of the cells' means."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int, Strategy], _Cell] = {}
        self.num_steps = 0

    def observe(
        self,
        strategy: Strategy,
        batch_size: int,
        mean_length: float,
        seconds: float,
        weight: float = 1.0,
        expected: float | None = None,
    ) -> None:
        """`weight` below 1: the step is known not to be typical.  expected: the seconds that were predicted, if they were."""
        self.num_steps += 1
        key = (_bucket(batch_size), round(math.log2(mean_length)), strategy)
        cell = self.cells.get(key)
        if cell is not None and cell.count >= 4:
            seconds = min(seconds, _MAX_OUTLIER * cell.seconds)
        elif expected is not None and seconds > _SURPRISE * expected:
            weight *= _WEIGHT_OF_SURPRISE
        features = _features(batch_size, mean_length, strategy)
        if cell is None:
            cell = self.cells[key] = _Cell(features, _prior_log_seconds(batch_size, strategy))
        cell.count = min(cell.count * self._fade(cell) + weight, _MEMORY)
        share = min(weight / cell.count, 1.0)
        cell.seconds += (seconds - cell.seconds) * share
        cell.features = cell.features + (features - cell.features) * share
        cell.step = self.num_steps

    def _fade(self, cell: _Cell) -> float:
        return math.exp(-(self.num_steps - cell.step) / _FORGET_STEPS)

    def predict(self, arms: Sequence[Strategy], batch_size: int, mean_length: float) -> tuple[Array, Array]:
        """Means and variances of the arms' log seconds. Without any measurement the mean is the prior's, whose constant is
        arbitrary."""
        wanted_AF = np.stack([_features(batch_size, mean_length, arm) for arm in arms])
        prior_A = np.array([_prior_log_seconds(batch_size, arm) for arm in arms])
        variance_A = _kernel(wanted_AF, wanted_AF).diagonal()
        cells = self._neighbours(batch_size)
        if not cells:
            return prior_A, variance_A
        known_CF = np.stack([cell.features for cell in cells])
        residual_C = np.log([cell.seconds for cell in cells]) - np.array([cell.prior for cell in cells])
        counts_C = np.array([max(cell.count * self._fade(cell), 0.05) for cell in cells])
        noise_C = _NOISE**2 / counts_C + _FLOOR**2
        # the unknown constant (seconds per unit of the prior) is the weighted mean: generalized least squares
        K_CC = _kernel(known_CF, known_CF) + np.diag(noise_C)
        L_CC = np.linalg.cholesky(K_CC)
        ones = np.linalg.solve(L_CC, np.ones(len(cells)))
        white = np.linalg.solve(L_CC, residual_C)
        constant = ones @ white / (ones @ ones)
        cross_CA = np.linalg.solve(L_CC, _kernel(known_CF, wanted_AF))
        mean_A = prior_A + constant + cross_CA.T @ (white - constant * ones)
        lost_A = 1.0 - cross_CA.T @ ones  # how much of the constant the data at hand leave to be guessed
        variance_A = variance_A - (cross_CA**2).sum(0) + lost_A**2 / (ones @ ones)
        return mean_A, variance_A.clip(1e-8)

    def _neighbours(self, batch_size: int) -> list[_Cell]:
        """The cells nearest in batch size, the latest first among equals."""
        place = math.log2(batch_size)
        ordered = sorted(self.cells.values(), key=lambda cell: (round(abs(cell.features[0] - place)), -cell.step))
        return ordered[:_MAX_NEIGHBOURS]


def _bucket(batch_size: int) -> int:
    """Batch sizes 1, 2, 3, ... apart while small, then four to the doubling."""
    return batch_size if batch_size <= 4 else 4 + round(4 * math.log2(batch_size / 4))


def _kernel(a_AF: Array, b_BF: Array) -> Array:
    gaps_AB = (((a_AF[:, None] - b_BF) / _LENGTHS) ** 2).sum(-1)
    result: Array = (a_AF * _SLOPES**2) @ b_BF.T + _BEND**2 * np.exp(-0.5 * gaps_AB)
    return result


# ── the tuner ────────────────────────────────────────────────────────────────────────────────────────────────────────

_WEIGHT_OF_ADMISSION = 0.3
"""Of a step in which sequences were admitted: a drafter may have read their prompts. Where every step admits some, all
weigh the same."""


@dataclass(frozen=True)
class Prediction:
    """What the model expects of an arm: tokens per second of the whole batch, the standard deviation of its logarithm, and the
    seconds of a step."""

    strategy: Strategy
    speed: float
    deviation: float
    seconds: float


class CostModel:
    """Chooses the arm with the best prediction plus a bonus for what is not known about it.

    bonus: standard deviations added (GP-UCB's beta to the power 1/2).
    decide_every: seconds of engine time between two decisions for an unchanged batch size; bounds what deciding costs.
    """

    def __init__(self, arms: Sequence[Strategy], *, bonus: float = 0.75, decide_every: float = 0.03) -> None:
        assert Strategy.OFF in arms, "off is always an arm"
        self.arms = tuple(arms)
        self.bonus, self.decide_every = bonus, decide_every
        self.acceptance, self.costs = Acceptance(), StepCosts()
        self.predicted_speed: float | None = None
        self._choice = Strategy.OFF
        self._expected_seconds: float | None = None
        self._chosen_for = -1
        self._seconds_since = 0.0
        self._versions: tuple[int, int] | None = None
        self._previous: Strategy | None = None

    def choose(self, batch: BatchState) -> Strategy:
        versions = (batch.policy_version, batch.drafter_version)
        if versions != self._versions:
            self._age(versions)
        if batch.num_running != self._chosen_for or self._seconds_since >= self.decide_every:
            choice = self.decide(batch)
            self._choice, self._chosen_for, self._seconds_since = choice.strategy, batch.num_running, 0.0
            has_measured = bool(self.costs.cells)
            self.predicted_speed = choice.speed if has_measured else None
            self._expected_seconds = choice.seconds if has_measured else None
        return self._choice

    def decide(self, batch: BatchState) -> Prediction:
        """The arm to run now: a pure function of the statistics."""
        return max(self.predict(batch), key=lambda p: math.log(p.speed) + self.bonus * p.deviation)

    def predict(self, batch: BatchState) -> list[Prediction]:
        mean_A, variance_A = self.costs.predict(self.arms, batch.num_running, batch.mean_length)
        tokens_A, uncertainty_A = self.acceptance.expected_tokens(self.arms)
        speed_A = batch.num_running * tokens_A / np.exp(mean_A)
        deviation_A = np.sqrt(variance_A + uncertainty_A)
        rows = zip(self.arms, speed_A.tolist(), deviation_A.tolist(), np.exp(mean_A).tolist(), strict=True)
        return [Prediction(*row) for row in rows]

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self._seconds_since += outcome.seconds
        if outcome.accepted:
            self.acceptance.observe(strategy, outcome.accepted)
        if not _switches_on(self._previous, strategy):  # that step also catches up with what was decoded plainly
            weight = _WEIGHT_OF_ADMISSION if batch.num_admitted else 1.0
            expected = self._expected_seconds if strategy == self._choice else None
            self.costs.observe(strategy, batch.num_running, batch.mean_length, outcome.seconds, weight, expected)
        self._previous = strategy

    def _age(self, versions: tuple[int, int]) -> None:
        if self._versions is not None:
            self.acceptance.age()
        self._versions, self._chosen_for = versions, -1


def _switches_on(before: Strategy | None, now: Strategy) -> bool:
    """Whether the learned drafter runs now and did not run in the step before."""

    def runs(strategy: Strategy | None) -> bool:
        return strategy is not None and not strategy.is_off and strategy.drafter != "ngram"

    return runs(now) and not runs(before)
