"""The slowdown of decoding ranks by idle ranks' work on the same machine: a regression over engine steps.

    log seconds(step) = level(strategy, batch size, idle ranks) + Σ_use cost(use) · ranks at this use then

Idle ranks rest for short windows between their work: each level has steps with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt.base.records import IdleStretch, IdleUse, TimedStep

_Array = NDArray[np.float64]
USES = (IdleUse.AHEAD, IdleUse.TRAIN)

_PRIOR = 0.2
"""Prior standard deviation of a cost: an idle neighbour hardly makes a step longer by more than half."""
_NOISE, _NOISE_STEPS = 0.25, 20.0
"""Prior standard deviation of a step's log seconds about its level, and its weight in steps."""
_MEMORY = 4000.0
"""Steps that an estimate remembers: work and batches change."""
_LIMIT = 0.7
"""Clips a step's distance from its level, in log seconds: allocations and other processes cause larger
ones."""
_SLACK = 0.01
"""A step counts if the number of idle neighbours changed for at most this share of it."""


@dataclass(frozen=True)
class Cost:
    """The share by which a step takes longer, with its standard deviation."""

    mean: float = 0.0
    deviation: float = _PRIOR


@dataclass(frozen=True)
class SlowdownSums:
    """x: shares of the uses, y: log seconds, both about their level's mean."""

    xx_UU: _Array
    xy_U: _Array
    yy: float
    num_steps: float
    """Engine steps, less one per level."""

    @classmethod
    def zero(cls) -> SlowdownSums:
        return cls(np.zeros((len(USES), len(USES))), np.zeros(len(USES)), 0.0, 0.0)

    def plus(self, other: SlowdownSums, fade: float = 1.0) -> SlowdownSums:
        return SlowdownSums(
            fade * self.xx_UU + other.xx_UU,
            fade * self.xy_U + other.xy_U,
            fade * self.yy + other.yy,
            fade * self.num_steps + other.num_steps,
        )


class Slowdown:
    def __init__(self) -> None:
        self.sums = SlowdownSums.zero()

    def observe(self, sums: SlowdownSums) -> None:
        self.sums = self.sums.plus(sums, math.exp(-sums.num_steps / _MEMORY))

    def costs(self) -> dict[IdleUse, Cost]:
        """Posterior of a linear regression with prior cost 0."""
        s = self.sums
        unexplained = max(s.yy - float(s.xy_U @ np.linalg.solve(s.xx_UU + np.eye(len(USES)), s.xy_U)), 0.0)
        variance = (unexplained + _NOISE_STEPS * _NOISE**2) / (s.num_steps + _NOISE_STEPS)
        covariance_UU = np.linalg.inv(s.xx_UU / variance + np.eye(len(USES)) / _PRIOR**2)
        mean_U = covariance_UU @ s.xy_U / variance
        deviation_U = np.sqrt(np.diag(covariance_UU))
        return {
            use: Cost(mean, dev)
            for use, mean, dev in zip(USES, mean_U.tolist(), deviation_U.tolist(), strict=True)
        }

    def counters(self) -> dict[str, Any]:
        s = self.sums
        return {"xx": s.xx_UU.tolist(), "xy": s.xy_U.tolist(), "yy": s.yy, "num_steps": s.num_steps}

    def restore(self, counters: Mapping[str, Any]) -> None:
        xx_UU, xy_U = np.array(counters["xx"]), np.array(counters["xy"])
        self.sums = SlowdownSums(xx_UU, xy_U, counters["yy"], counters["num_steps"])


def sums_of(steps: Sequence[TimedStep], neighbours: Sequence[Sequence[IdleStretch]]) -> SlowdownSums:
    """neighbours: idle stretches, rests included, of each other rank of the machine, on the same clock."""
    if not steps or not neighbours:
        return SlowdownSums.zero()
    starts_S, ends_S = np.array([s.start for s in steps]), np.array([s.end for s in steps])
    seconds_S: _Array = np.maximum(ends_S - starts_S, 1e-9)
    shares_US: dict[IdleUse, _Array] = {use: np.zeros(len(steps)) for use in IdleUse}
    for stretch in (stretch for stretches in neighbours for stretch in stretches):
        overlap_S = np.minimum(ends_S, stretch.end) - np.maximum(starts_S, stretch.start)
        shares_US[stretch.use] += np.maximum(overlap_S, 0.0) / seconds_S
    idle_S: _Array = np.sum([*shares_US.values()], axis=0)
    num_S = np.round(idle_S)
    counts_S = (num_S > 0) & (np.abs(idle_S - num_S) <= _SLACK)
    x_SU = np.stack([shares_US[use] for use in USES], axis=1)
    members: dict[tuple[str, int, int], list[int]] = {}
    for index in np.flatnonzero(counts_S).tolist():
        level = (steps[index].strategy, steps[index].num_running, int(num_S[index]))
        members.setdefault(level, []).append(index)
    return add_up(_sums_of_level(x_SU[level], np.log(seconds_S[level])) for level in members.values())


def _sums_of_level(x_MU: _Array, y_M: _Array) -> SlowdownSums:
    x_MU, y_M = x_MU - x_MU.mean(0), np.clip(y_M - np.median(y_M), -_LIMIT, _LIMIT)
    y_M = y_M - y_M.mean()
    return SlowdownSums(x_MU.T @ x_MU, x_MU.T @ y_M, float(y_M @ y_M), len(y_M) - 1.0)


def add_up(sums: Iterable[SlowdownSums]) -> SlowdownSums:
    total = SlowdownSums.zero()
    for one in sums:
        total = total.plus(one)
    return total
