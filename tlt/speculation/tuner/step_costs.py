"""Predicts the seconds of an engine step: a sum of physical parts, whose sizes are learned.

    seconds = forward(rows)                     the target reads its weights once and computes every row
            + cached tokens x cached            attention reads the caches
            + draft + levels x level …          the learned drafter (PARTS)
            + sequences x retrieved             retrieval, on the host
            + unread x read + first             once: tokens new to the drafter, the cost of a new shape

The prior follows from bytes and operations (`CostPrior`), up to the machine's speed. An extended Kalman
filter on the logarithms learns from every step: surprise is divided by share of the step and uncertainty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.expectation import Array

KNOTS = 14
"""Forwards are estimated at 1, 2, 4, … rows and interpolated in logarithms."""
PARTS = {
    "cached": 1.0,  # per token in the caches
    "draft": 0.5,  # per draft of the learned drafter
    "level": 0.15,  # per level of it
    "level_row": 0.7,  # per row of a level beyond the first
    "hybrid": 0.2,  # per level of the hybrid; retrieval saves some
    "retrieved": 0.7,  # per sequence that retrieval looks up
    "unread": 0.7,  # per token that the learned drafter reads late
    "first": 1.3,  # once per new shape
}
"""Parts beside the forward, with the prior standard deviation of each logarithm."""
_NUM = KNOTS + len(PARTS)
_CACHED, _DRAFT, _LEVEL, _LEVEL_ROW, _HYBRID, _RETRIEVED, _UNREAD, _FIRST = range(KNOTS, _NUM)
ONCE = slice(_UNREAD, _NUM)
"""The parts that a next step of the same kind does not have."""

_NOISE, _NOISE_OF_PREFILL = 0.15, 0.3
"""Standard deviations of log(seconds) of a step, and of a prefill."""
_MAX_SURPRISE = 2.5
"""Standard deviations per step at which surprise is clipped: probably the machine was busy."""
_FORGET = 1 / 4000
"""Share of the prior's uncertainty that returns per step: costs drift."""
_RETRIEVED_SECONDS = 30e-6
"""Prior of a lookup for one sequence."""
_ROUGH = 0.06
"""Prior standard deviation of log(forward) about a roofline."""
_DEVIATION_OF_DRAFTER = 0.4
"""Prior standard deviation of log(a factor shared by the learned drafter's parts)."""


@functools.cache
def uses(strategy: Strategy) -> tuple[bool, bool]:
    """Whether the learned drafter runs, and whether retrieval does."""
    drafter = strategy.without_reference.drafter
    return drafter in ("learned", "hybrid"), drafter in ("ngram", "hybrid")


@dataclass(frozen=True)
class CostPrior:
    """Sizes relative to the target's weights, its head included."""

    level: float = 0.15
    """Drafter weights read per drafted token, with the head."""
    read: float = 0.04
    """Drafter weights without a head."""
    head: float = 0.15
    """Weights of the target's head."""
    cached: float = 1e-5
    """A token's keys and values."""
    draft: float | None = None
    """Drafter weights read once per draft; None: a small part of a level."""
    level_row: float | None = None
    """Drafter weights per row; None: those of a level."""


UNKNOWN = CostPrior()


class StepWork(NamedTuple):
    strategy: Strategy
    batch_size: int
    mean_length: float
    rows: float
    """Rows of the target's forward."""
    levels: float
    """Levels of the learned drafter, one after the other."""
    unread: float = 0.0
    """Tokens that the learned drafter reads first."""
    is_first: bool = False

    def amounts(self) -> list[float]:
        """In the order of PARTS."""
        is_learned, is_retrieved = uses(self.strategy)
        levels = self.levels if is_learned else 0.0
        rows = self.batch_size * (1 + (self.strategy.width - 1) / 2)
        learned = [1.0, 0.0 if is_retrieved else levels, levels * (rows - 1), levels if is_retrieved else 0.0]
        cached = self.batch_size * self.mean_length
        retrieved = float(self.batch_size if is_retrieved else 0)
        unread = self.unread if is_learned else 0.0
        return [cached, *(learned if is_learned else (0.0,) * 4), retrieved, unread, float(self.is_first)]


class Forecast(NamedTuple):
    seconds_A: Array
    """Without `once_A`."""
    once_A: Array
    """The parts in ONCE."""
    shares_AP: Array
    """The gradient of log(seconds_A) in the logarithms of all parts."""

    def split(self, num: int) -> tuple[Forecast, Array]:
        """The first `num` steps' forecast, and the seconds of the others."""
        first = Forecast(self.seconds_A[:num], self.once_A[:num], self.shares_AP[:num])
        return first, self.seconds_A[num:]


class StepCosts:
    """mean_P, covariance_PP: of the logarithms of all parts; the forward's knots come first."""

    def __init__(self, prior: CostPrior = UNKNOWN) -> None:
        self.prior = prior
        self.mean_P, self._drift_PP = _prior(prior)
        is_scaled_P = np.where(np.arange(_NUM) == _RETRIEVED, 0.0, 1.0)
        scale_PP = np.outer(is_scaled_P, is_scaled_P)
        self.covariance_PP = self._drift_PP + 16.0 * scale_PP  # the machine's speed is unknown
        self._drift_PP = _FORGET * (self._drift_PP + 0.1 * scale_PP)
        self.num_steps: dict[Strategy, int] = {}

    def observe(self, works: Sequence[StepWork], seconds: Sequence[float], is_typical: bool = True) -> None:
        """Learns from steps of one strategy as from their mean, with less noise.

        is_typical: whether their seconds exclude prefill.
        """
        strategy, num = works[0].strategy, len(works)
        self.num_steps[strategy] = self.num_steps.get(strategy, 0) + num
        rows = sum(work.rows for work in works) / num
        amounts = [sum(column) / num for column in zip(*(work.amounts() for work in works), strict=True)]
        took = math.exp(sum(map(math.log, seconds)) / num)
        noise = (_NOISE if is_typical else 3 * _NOISE) / math.sqrt(num)
        self._update(rows, amounts, took, noise, num)

    def observe_prefill(self, num_tokens: float, num_forwards: int, seconds: float) -> None:
        """A prefill is a forward of one row per token, without the head."""
        rows = max(num_tokens / num_forwards * (1 - self.prior.head), 1.0)
        self._update(rows, [0.0] * (len(PARTS) - 1) + [1.0], seconds / num_forwards, _NOISE_OF_PREFILL)

    def forecast(self, works: Sequence[StepWork]) -> Forecast:
        knots_AK = _knots(np.array([work.rows for work in works]))
        forward_A = np.exp(knots_AK @ _rising(self.mean_P[:KNOTS], self.covariance_PP.diagonal()[:KNOTS]))
        parts_AJ = np.array([work.amounts() for work in works]) * np.exp(self.mean_P[KNOTS:])
        once_A = parts_AJ[:, -2:].sum(1)
        seconds_A = forward_A + parts_AJ.sum(1) - once_A
        shares_AP = np.hstack([knots_AK * forward_A[:, None], parts_AJ])
        shares_AP[:, ONCE] = 0.0
        return Forecast(seconds_A, once_A, shares_AP / seconds_A[:, None])

    def variance(self, shares_AP: Array, other: int) -> Array:
        """By arm: the variance of log(its seconds / another arm's)."""
        differences_AP = shares_AP - shares_AP[other]
        result: Array = ((differences_AP @ self.covariance_PP) * differences_AP).sum(1)
        return result

    def variance_removed(self, shares_AP: Array, best: int, num_steps: float) -> Array:
        """By arm: the variance of log(its seconds / the best arm's) that this many steps of it should
        remove."""
        covariance_AA = shares_AP @ self.covariance_PP @ shares_AP.T
        own_A = covariance_AA.diagonal()
        result: Array = (own_A - covariance_AA[best]) ** 2 / (own_A + _NOISE**2 / num_steps)
        return result

    def _update(
        self, rows: float, amounts: Sequence[float], seconds: float, noise: float, num_steps: int = 1
    ) -> None:
        knots_K = _knots(np.array([rows]))[0]
        forward = math.exp(knots_K @ self.mean_P[:KNOTS])
        parts_J = np.array(amounts) * np.exp(self.mean_P[KNOTS:])
        expected = forward + parts_J.sum()
        shares_P = np.concatenate([knots_K * forward, parts_J]) / expected
        spread_P = self.covariance_PP @ shares_P
        variance = shares_P @ spread_P + noise**2
        limit = num_steps * _MAX_SURPRISE * math.sqrt(variance)
        surprise = min(max(math.log(seconds / expected), -limit), limit)
        self.mean_P = self.mean_P + spread_P * (surprise / variance)
        self.covariance_PP = (1 - num_steps * _FORGET) * (
            self.covariance_PP - np.outer(spread_P, spread_P) / variance
        ) + num_steps * self._drift_PP

    def counters(self) -> dict[str, Any]:
        steps = {str(arm): num for arm, num in self.num_steps.items()}
        return {"mean": self.mean_P.tolist(), "covariance": self.covariance_PP.tolist(), "num_steps": steps}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.mean_P, self.covariance_PP = np.array(counters["mean"]), np.array(counters["covariance"])
        self.num_steps = {Strategy.parse(arm): num for arm, num in counters["num_steps"].items()}


def _knots(rows_A: Array) -> Array:
    """Interpolation weights, [A, K]. The last two knots extrapolate."""
    place_A = np.log2(rows_A)
    below_A = np.minimum(place_A.astype(int), KNOTS - 2)
    weights_AK = np.zeros((len(rows_A), KNOTS))
    index_A = np.arange(len(rows_A))
    weights_AK[index_A, below_A + 1] = place_A - below_A
    weights_AK[index_A, below_A] = 1 - (place_A - below_A)
    return weights_AK


def _rising(mean_K: Array, variance_K: Array) -> Array:
    """The nearest non-decreasing values (pool adjacent violators): more rows never take less."""
    pools: list[tuple[float, float, int]] = []  # value, weight, knots
    for value, variance in zip(mean_K.tolist(), variance_K.tolist(), strict=True):
        weight, num = 1 / variance, 1
        while pools and pools[-1][0] > value:
            other, beside, more = pools.pop()
            value = (value * weight + other * beside) / (weight + beside)
            weight, num = weight + beside, num + more
        pools.append((value, weight, num))
    return np.repeat([value for value, _, _ in pools], [num for _, _, num in pools])


def _prior(prior: CostPrior) -> tuple[Array, Array]:
    """Returns mean and covariance of the parts' logarithms for a machine whose one-row forward takes 10 ms.

    A forward reads weights and computes rows; the two overlap (maximum, the roofline) or do not (sum). The
    prior is the spread over machines: 4 to 512 rows take as long as the weights, from maximum to sum.
    """
    rows_K = 2.0 ** np.arange(KNOTS)
    machines = []
    for knee in 2.0 ** np.arange(2, 10):
        for power in (1, 2, 8):
            forward_K = np.log1p((rows_K / knee) ** power) / power
            forward_K = forward_K - forward_K[0]
            row = forward_K[-1] - math.log(rows_K[-1])
            level, read = math.log(prior.level), math.log(prior.read)
            draft = level - 1.5 if prior.draft is None else math.log(prior.draft)
            drafter = [draft, level, math.log(prior.level_row or prior.level) + row - 0.7, level]
            parts = [math.log(prior.cached), *drafter, 0.0, read + row, math.log(0.5)]
            machines.append([*forward_K, *parts])
    mean_P, covariance_PP = np.mean(machines, 0), np.cov(np.array(machines).T)
    mean_P += math.log(0.01)
    mean_P[_RETRIEVED] = math.log(_RETRIEVED_SECONDS)
    own_P = np.array([_ROUGH] * KNOTS + [*PARTS.values()])
    drafter_P = np.zeros(_NUM)
    drafter_P[[_DRAFT, _LEVEL, _LEVEL_ROW, _HYBRID]] = _DEVIATION_OF_DRAFTER
    return mean_P, covariance_PP + np.diag(own_P**2) + np.outer(drafter_P, drafter_P)
