"""A tuner that predicts: seconds of a step from measured seconds, tokens of a step from measured acceptance.

    speed(arm) = batch x E[tokens per verification] / seconds(batch, tokens in the forward, drafting)
                             └ Acceptance                  └ StepCosts
    choose the arm with the largest   log speed + bonus x standard deviation of its estimate

Every measurement informs its neighbours: acceptance is a survival curve shared by all depths of a drafter and lent to other
batch sizes; seconds are a Gaussian process over (batch, tokens in the forward, drafting work, length) in logarithms (Rasmussen
& Williams, ch. 2), and the bonus is that of GP-UCB (Srinivas et al., arXiv 0912.3995). So an arm that was never tried is tried
only where what is known leaves room for it to be the best.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tlt.types import BatchState, StepOutcome, Strategy

Array = NDArray[np.float64]

_DRAFTERS_OF = {"none": set(), "learned": {"learned"}, "ngram": {"ngram"}, "hybrid": {"learned", "ngram"}}
"""What runs for a strategy of this kind."""

# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_PRIOR_HAZARD = 0.7
_PRIOR_COUNT = 1.5
_ACCEPTANCE_MEMORY = 100.0
"""Steps. A text changes its character within itself, and in the tail few texts are left."""
_MEMORY_ELSEWHERE = 4000.0
"""Verifications that the curve over all batch sizes spans."""
_WORTH_ELSEWHERE = 16.0
_WORTH_AT_NEW_VERSION = 16.0
"""What was seen of an older policy or drafter counts as at most so many verifications: enough to start from, and little
enough that a drafter which has become better, or worse, is soon found out."""


class Acceptance:
    """P(the walk survives to depth d), from how far walks came. One curve per drafter for chains and one per tree shape.

    The texts that are left in the tail are not those of the beginning, so a batch size has a curve of its own per doubling;
    what was seen at others counts as at most `_WORTH_ELSEWHERE` verifications there. A depth seen rarely leans on the one
    before it, and the hybrid on the learned chain, of which it keeps what it can. Where a chain stopped, its walk did not
    survive; a tree, which never stops, leans on what chains of its drafter accepted where they did draft.
    """

    def __init__(self) -> None:
        self.tried: dict[_Curve, Array] = {}
        self.survived: dict[_Curve, Array] = {}
        self._hazards: dict[_Curve, list[tuple[float, float]]] = {}

    def observe(self, strategy: Strategy, accepted: Sequence[int], drafted: Sequence[int] = ()) -> None:
        """`drafted[b]` levels at most were drafted for row b (none given: all of them), a chain may have stopped."""
        self._hazards.clear()
        depth = strategy.depth
        came_B = np.minimum(np.asarray(accepted), depth)
        came_BD = came_B[:, None] >= np.arange(depth + 1)
        tried, survived = came_BD[:, :-1].sum(0), came_BD[:, 1:].sum(0)
        was_drafted_BD = np.asarray(drafted or [depth] * len(accepted))[:, None] > np.arange(depth)
        for octave in (_ANY, _octave(len(accepted))):
            curves = [(_curve(strategy, octave), tried)]
            if strategy.width == 1:
                curves.append(((strategy.drafter, *_DRAFTED, octave), (came_BD[:, :-1] & was_drafted_BD).sum(0)))
            fade = math.exp(-1 / _ACCEPTANCE_MEMORY) if octave != _ANY else math.exp(-len(accepted) / _MEMORY_ELSEWHERE)
            for curve, tried_here in curves:
                for counts, new in ((self.tried, tried_here), (self.survived, survived)):
                    counts.setdefault(curve, np.zeros(Strategy.MAX_DEPTH))
                    counts[curve] *= fade
                    counts[curve][:depth] += new

    def age(self, worth: float = _WORTH_AT_NEW_VERSION) -> None:
        self._hazards.clear()
        for curve, tried in self.tried.items():
            keep = min(worth / max(tried[0], worth), 1.0)
            tried *= keep
            self.survived[curve] *= keep

    def hazards(self, curve: _Curve) -> list[tuple[float, float]]:
        """(P(accepted at depth d | came so far), the number of observations behind it) for d = 1, 2, ..."""
        if curve in self._hazards:
            return self._hazards[curve]
        drafter, width, _, octave = curve
        prior = None
        if width > 1 or drafter == "hybrid":
            shape = _DRAFTED if width > 1 else (1, 0)
            prior = self.hazards(("learned" if drafter == "hybrid" else drafter, *shape, octave))
        anywhere = (*curve[:3], _ANY)
        tried, survived, all_tried, all_survived = (
            counts[c].tolist() if c in counts else _NOTHING for c in (curve, anywhere) for counts in (self.tried, self.survived)
        )
        result, hazard = [], _PRIOR_HAZARD
        for d in range(Strategy.MAX_DEPTH):
            if prior is not None:  # as if further candidates were worth what they are on average (DESIGN §2)
                hazard = 1.0 - (1.0 - prior[d][0]) ** math.sqrt(width)
            worth = all_tried[d] + _PRIOR_COUNT
            hazard = (all_survived[d] + _PRIOR_COUNT * hazard) / worth
            worth = min(worth, _WORTH_ELSEWHERE)
            hazard = (survived[d] + worth * hazard) / (tried[d] + worth)
            result.append((hazard, tried[d] + worth))
        self._hazards[curve] = result
        return result

    def expected_tokens(self, arms: Sequence[Strategy], batch_size: int) -> tuple[Array, Array]:
        """Tokens per verification, the bonus token included, per arm; and the variance of their logarithms."""
        octave = _octave(batch_size)
        tokens_A, variance_A = np.ones(len(arms)), np.zeros(len(arms))
        for i, arm in enumerate(arms):
            curve = self.hazards(_curve(arm, octave))[: arm.depth]
            survivals = list(accumulate((hazard for hazard, _ in curve), operator.mul))
            tokens_A[i] += sum(survivals)
            beyond, variance = 0.0, 0.0
            for (hazard, count), survival in zip(reversed(curve), reversed(survivals), strict=True):
                beyond += survival  # what hangs on this depth
                variance += beyond**2 * (1.001 - hazard) / ((hazard + 0.001) * count)
            variance_A[i] = variance / tokens_A[i] ** 2
        return tokens_A, variance_A


_Curve = tuple[str, int, int, int]
"""Drafter, width, budget (1 and 0 for all chains) and the octave of the batch size."""
_DRAFTED = (1, 1)
"""Instead of (1, 0): of chains, where they did draft."""
_ANY = -1
"""Instead of an octave: all batch sizes."""
_NOTHING = [0.0] * Strategy.MAX_DEPTH


def _curve(strategy: Strategy, octave: int) -> _Curve:
    shape = (1, 0) if strategy.width == 1 else (strategy.width, strategy.budget)
    return (strategy.drafter, *shape, octave)


def _octave(batch_size: int) -> int:
    return round(math.log2(batch_size))


# ── seconds ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NOISE = 0.22
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
_HALF_ROWS = 16.0
"""Prior: a forward of n tokens costs as much as n + 16, roughly what it takes before weights stop dominating."""
_DRAFT_COST = 0.06
"""Prior: one drafting step costs this share of a forward."""
_MAX_NEIGHBOURS = 48

_SLOPES = np.array([0.4, 0.3, 0.3, 0.3, 0.2, 0.2])
"""Prior standard deviations of log seconds per unit of each feature, about the prior's mean."""
_BEND, _LENGTHS = 0.15, np.array([1.5, 1.0, 1.0, 2.0, 1.0, 1.0])
"""Amplitude and length scales of what is not linear."""


def _features(batch_size: float, mean_length: float, strategy: Strategy) -> Array:
    """log2 of batch, of tokens in the forward, of drafting work and of length; whether each kind of drafter runs."""
    place, length = math.log2(batch_size), math.log2(mean_length / 256)
    result: Array = _shape(strategy) + np.array([place, place, 0.0, length, 0.0, 0.0])
    return result


@functools.cache
def _shape(strategy: Strategy) -> Array:
    """The part of the features that is the strategy's own."""
    work = strategy.depth * (1 + (strategy.width - 1) / 4)
    learned, retrieved = ("learned" in _DRAFTERS_OF[strategy.drafter]), ("ngram" in _DRAFTERS_OF[strategy.drafter])
    return np.array([0.0, math.log2(1 + strategy.budget), math.log2(1 + learned * work), 0.0, learned, retrieved])


def _prior_log_seconds(features_AF: Array) -> Array:
    """Up to a constant."""
    rows_A, work_A = np.exp2(features_AF[..., 1]), np.exp2(features_AF[..., 2]) - 1
    result: Array = np.log((_HALF_ROWS + rows_A) * (1 + _DRAFT_COST * work_A))
    return result


@dataclass
class _Cell:
    """Measurements of one arm at nearly one batch size and length."""

    features: Array
    octave: int
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
            cell = self.cells[key] = _Cell(features, _octave(batch_size))
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
        prior_A = _prior_log_seconds(wanted_AF)
        variance_A = wanted_AF**2 @ _SLOPES**2 + _BEND**2
        cells = self._neighbours(batch_size)
        if not cells:
            return prior_A, variance_A
        known_CF = np.stack([cell.features for cell in cells])
        residual_C = np.log([cell.seconds for cell in cells]) - _prior_log_seconds(known_CF)
        counts_C = np.array([max(cell.count * self._fade(cell), 0.05) for cell in cells])
        K_CC = _kernel(known_CF, known_CF) + np.diag(_NOISE**2 / counts_C + _FLOOR**2)
        cross_CA = _kernel(known_CF, wanted_AF)
        # the unknown constant (seconds per unit of the prior) is the weighted mean: generalized least squares
        solved = np.linalg.solve(K_CC, np.column_stack([np.ones(len(cells)), residual_C, cross_CA]))
        ones_C, white_C, weights_CA = solved[:, 0], solved[:, 1], solved[:, 2:]
        constant = white_C.sum() / ones_C.sum()
        mean_A = prior_A + constant + cross_CA.T @ (white_C - constant * ones_C)
        lost_A = 1.0 - weights_CA.sum(0)  # how much of the constant the data at hand leave to be guessed
        explained_A = (cross_CA * weights_CA).sum(0) - lost_A**2 / ones_C.sum()
        return mean_A, np.maximum(variance_A - explained_A, 1e-8)

    def _neighbours(self, batch_size: int) -> list[_Cell]:
        """The cells nearest in batch size, the latest first among equals."""
        octave = _octave(batch_size)
        ordered = sorted(self.cells.values(), key=lambda cell: (abs(cell.octave - octave), -cell.step))
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
        tokens_A, uncertainty_A = self.acceptance.expected_tokens(self.arms, batch.num_running)
        speed_A = batch.num_running * tokens_A / np.exp(mean_A)
        deviation_A = np.sqrt(variance_A + uncertainty_A)
        rows = zip(self.arms, speed_A.tolist(), deviation_A.tolist(), np.exp(mean_A).tolist(), strict=True)
        return [Prediction(*row) for row in rows]

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self._seconds_since += outcome.seconds
        if outcome.accepted:
            self.acceptance.observe(strategy, outcome.accepted, outcome.drafted)
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
    """Whether a drafter runs now that did not run in the step before: it catches up, be it with features or with texts."""
    ran = set() if before is None else _DRAFTERS_OF[before.drafter]
    return not _DRAFTERS_OF[now.drafter] <= ran
