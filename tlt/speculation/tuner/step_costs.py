"""Predicts the seconds of an engine step: a sum of parts, whose sizes are learned.

    seconds = forward(rows)                          the target reads its weights once and computes every row
            + cached x (read + rows / sequences x attended)     keys and values, which a sequence's rows share
            + draft + levels x (level + level_row)   the learned drafter, one level after the other
            + sequences x retrieved                  retrieval, on the host

An extended Kalman filter on the logarithms learns from every step: surprise is divided by share of the step
and uncertainty. So one measured strategy informs the others.

Axes: A arms · K knots of the forward · J parts beside the forward (PARTS) · P all parts, K and J
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt.base.strategy import Strategy

Array = NDArray[np.float64]

KNOTS = 14
"""Forwards are estimated at 1, 2, 4, … rows and interpolated in logarithms."""
PARTS = {
    "draft": (-3.8, 0.7),  # once per draft of the learned drafter
    "level": (-2.3, 0.6),  # per level of it
    "hybrid": (-2.3, 0.6),  # per level of the hybrid, which may retrieve instead
    "level_row": (-3.0, 1.0),  # per row of a level beyond the first, beside a row of the forward
    "retrieved": (-6.0, 1.0),  # per sequence that retrieval looks up
    "read": (-10.0, 2.0),  # per cached token
    "attended": (-11.5, 2.0),  # per cached token and row of its sequence
}
"""Parts beside the forward, with prior mean, relative to a forward of one row, and standard deviation of
each logarithm."""
_READ, _ATTENDED = (list(PARTS).index(name) for name in ("read", "attended"))

NOISE = 0.15
"""Standard deviation of log(seconds) of a step."""
_MAX_SURPRISE = 2.5
"""Standard deviations per step at which surprise is clipped: probably the machine was busy."""
_FORGET = 1 / 4000
"""Share of the prior's uncertainty that returns per step: costs drift."""
_ROUGH = 0.06
"""Prior standard deviation of log(forward) about a roofline."""
_SPEED = 4.0
"""Prior standard deviation of log(the machine's speed)."""


class Forecast(NamedTuple):
    seconds_A: Array
    shares_AP: Array
    """The gradient of log(seconds_A) in the logarithms of all parts."""


class StepCosts:
    """mean_P, covariance_PP: of the logarithms of all parts; the forward's knots come first."""

    def __init__(self, arms: Sequence[Strategy]) -> None:
        works = [_work(arm) for arm in arms]
        self._fixed_AJ, self._each_AJ = (np.array(column, float) for column in zip(*works, strict=True))
        self.mean_P, prior_PP = _prior()
        self.covariance_PP = prior_PP + _SPEED**2
        self._drift_PP = _FORGET * (prior_PP + 0.1)

    def forecast(self, rows_A: Array, batch_size: int, num_cached: int = 0) -> Forecast:
        """rows_A: of the target's forward. num_cached: see `BatchState`."""
        knots_AK = _knots(rows_A)
        forward_A = np.exp(knots_AK @ np.maximum.accumulate(self.mean_P[:KNOTS]))
        amounts_AJ = _amounts(self._fixed_AJ, self._each_AJ, rows_A, batch_size, num_cached)
        parts_AJ = amounts_AJ * np.exp(self.mean_P[KNOTS:])
        seconds_A = forward_A + parts_AJ.sum(1)
        shares_AP = np.hstack([knots_AK * forward_A[:, None], parts_AJ]) / seconds_A[:, None]
        return Forecast(seconds_A, shares_AP)

    def variance(self, shares_AP: Array, other: int) -> Array:
        """By arm: the variance of log(its seconds / another arm's)."""
        differences_AP = shares_AP - shares_AP[other]
        result: Array = ((differences_AP @ self.covariance_PP) * differences_AP).sum(1)
        return result

    def observe(
        self,
        arm: int,
        batch_size: int,
        rows: float,
        seconds: float,
        noise: float,
        num: int,
        num_cached: float = 0.0,
    ) -> None:
        """Learns from `num` like steps. seconds: their median; noise: its logarithm's standard deviation."""
        knots_K = _knots(np.array([rows]))[0]
        forward = math.exp(knots_K @ self.mean_P[:KNOTS])
        amounts_J = _amounts(self._fixed_AJ[arm], self._each_AJ[arm], rows, batch_size, num_cached)
        parts_J = amounts_J * np.exp(self.mean_P[KNOTS:])
        expected = forward + parts_J.sum()
        shares_P = np.concatenate([knots_K * forward, parts_J]) / expected
        spread_P = self.covariance_PP @ shares_P
        variance = shares_P @ spread_P + noise**2
        limit = num * _MAX_SURPRISE * math.sqrt(variance)
        surprise = min(max(math.log(seconds / expected), -limit), limit)
        self.mean_P = self.mean_P + spread_P * (surprise / variance)
        kept_PP = self.covariance_PP - np.outer(spread_P, spread_P) / variance
        self.covariance_PP = (1 - num * _FORGET) * kept_PP + num * self._drift_PP

    def counters(self) -> dict[str, Any]:
        return {"mean": self.mean_P.tolist(), "covariance": self.covariance_PP.tolist()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.mean_P, self.covariance_PP = np.array(counters["mean"]), np.array(counters["covariance"])


def _work(arm: Strategy) -> tuple[list[float], list[float]]:
    """Amounts of PARTS without the cache's, and what a sequence adds to them."""
    drafting = arm.without_reference
    is_retrieved = drafting.drafter in ("ngram", "hybrid")
    is_learned = drafting.drafter in ("learned", "hybrid")
    levels = float(is_learned * drafting.depth)
    alone, beside = (0.0, levels) if is_retrieved else (levels, 0.0)
    fixed = [float(is_learned), alone, beside, -levels, 0.0, 0.0, 0.0]
    return fixed, [0.0, 0.0, 0.0, levels, float(is_retrieved), 0.0, 0.0]


def _amounts(fixed: Array, each: Array, rows: Any, batch_size: int, num_cached: float) -> Array:
    """Of PARTS, for all arms or for one. fixed, each: from `_work`; rows: of the forward."""
    amounts = fixed + batch_size * each
    amounts[..., _READ] = num_cached
    amounts[..., _ATTENDED] = rows * (num_cached / batch_size)
    return amounts


def _knots(rows_A: Array) -> Array:
    """Interpolation weights [A, K]; the last two knots extrapolate."""
    place_A = np.log2(rows_A)
    below_A = np.minimum(place_A.astype(int), KNOTS - 2)
    above_A, arms = place_A - below_A, np.arange(len(rows_A))
    weights_AK = np.zeros((len(rows_A), KNOTS))
    weights_AK[arms, below_A], weights_AK[arms, below_A + 1] = 1 - above_A, above_A
    return weights_AK


def _prior() -> tuple[Array, Array]:
    """Mean and covariance of the parts' logarithms; a forward of one row takes 10 ms.

    Reading weights and computing rows overlap (maximum, the roofline) or do not (sum). The prior is the
    spread over machines: 4 to 512 rows take as long as the weights.
    """
    rows_K = 2.0 ** np.arange(KNOTS)
    means_J, deviations_J = np.array(list(PARTS.values())).T
    machines = []
    for knee in 2.0 ** np.arange(2, 10):
        for power in (1, 2, 8):
            forward_K = np.log1p((rows_K / knee) ** power) / power
            parts_J = means_J.copy()
            parts_J[3] += forward_K[-1] - forward_K[0] - math.log(rows_K[-1])
            machines.append([*(forward_K - forward_K[0]), *parts_J])
    deviations_P = np.concatenate([np.full(KNOTS, _ROUGH), deviations_J])
    return np.mean(machines, 0) + math.log(0.01), np.cov(np.array(machines).T) + np.diag(deviations_P**2)
