"""The seconds of an engine step, predicted by a Gaussian process over the steps measured so far. It knows no acceptance.

    log seconds(step) = log prior(features) + constant + deviation(features)

The prior knows that a forward costs more with more tokens and with more drafting; the constant is the machine's speed; the
deviation is the Gaussian process (Rasmussen & Williams, ch. 2), with a linear and a squared-exponential kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.tuning.acceptance import Array, octave_of
from tlt.types import Strategy

_DRAFTERS_OF = {"none": set(), "learned": {"learned"}, "ngram": {"ngram"}, "hybrid": {"learned", "ngram"}}


def drafters_of(strategy: Strategy) -> set[str]:
    """Returns the drafters that run for a strategy; to follow a reference is none."""
    return _DRAFTERS_OF[strategy.elsewhere.drafter if strategy.follows else strategy.drafter]


_NOISE = 0.22
"""Standard deviation of one step's log seconds about its mean."""
_FLOOR = 0.02
"""The part of this deviation that no number of measurements removes: costs drift."""
_MEMORY = 100.0
"""Measurements that a cell's mean spans."""
_FORGET_STEPS = 4000.0
"""Engine steps after which a cell's evidence counts for 1/e."""
_MAX_OUTLIER = 3.0
"""A step that is slower than its cell's mean by more than this factor is counted as slower by this factor."""
_SURPRISE, _WEIGHT_OF_SURPRISE = 1.5, 0.2
"""A step that is slower than predicted by more than the first factor has the second as its weight, as long as its arm was
hardly tried: most likely memory was allocated, or the machine was busy."""
_HALF_ROWS = 16.0
"""Prior: a forward of n tokens costs as much as n + 16, roughly what it takes before weights stop dominating."""
_DRAFT_COST = 0.06
"""Prior: one drafting step costs this share of a forward."""
_MAX_NEIGHBOURS = 48
"""Cells that a prediction reads."""

_ROWS, _WORK = 1, 2
"""The features that the prior reads: tokens in the forward, and drafting work."""
_SLOPES = np.array([0.4, 0.3, 0.3, 0.3, 0.2, 0.2])
"""Prior standard deviations of log seconds per unit of each feature, about the prior's mean."""
_BEND, _LENGTHS = 0.15, np.array([1.5, 1.0, 1.0, 2.0, 1.0, 1.0])
"""Amplitude and length scales of the squared-exponential kernel: the part of the costs that is not linear."""


def _features(batch_size: float, mean_length: float, strategy: Strategy) -> Array:
    """Returns float64[F]: log2 of the batch size, of the tokens in the forward, of the drafting work and of the sequences'
    length; then 0 or 1, whether the learned drafter runs and whether retrieval does."""
    place, length = math.log2(batch_size), math.log2(mean_length / 256)
    result: Array = _strategy_features(strategy) + np.array([place, place, 0.0, length, 0.0, 0.0])
    return result


@functools.cache
def _strategy_features(strategy: Strategy) -> Array:
    """Returns the part of the features that the strategy alone decides."""
    depth = strategy.elsewhere.depth if strategy.follows else strategy.depth
    work = depth * (1 + (strategy.width - 1) / 4)
    learned, retrieved = ("learned" in drafters_of(strategy)), ("ngram" in drafters_of(strategy))
    return np.array([0.0, math.log2(1 + strategy.budget), math.log2(1 + learned * work), 0.0, learned, retrieved])


def _prior_log_seconds(features_AF: Array) -> Array:
    """Returns the prior's mean, up to the machine's constant."""
    rows_A, work_A = np.exp2(features_AF[..., _ROWS]), np.exp2(features_AF[..., _WORK]) - 1
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
    """Predicts the seconds of an engine step from the means of cells: steps of one arm at nearly one batch size and length."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int, Strategy], _Cell] = {}
        """By bucket of batch sizes, octave of lengths, and arm."""
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
        """Counts one engine step.

        weight: below 1 where the step is known not to be typical.  expected: the seconds that were predicted. None: none were.
        """
        self.num_steps += 1
        key = (_bucket(batch_size), round(math.log2(mean_length)), strategy)
        cell = self.cells.get(key)
        if cell is not None and cell.count >= 4:
            seconds = min(seconds, _MAX_OUTLIER * cell.seconds)
        elif expected is not None and seconds > _SURPRISE * expected:
            weight *= _WEIGHT_OF_SURPRISE
        features = _features(batch_size, mean_length, strategy)
        if cell is None:
            cell = self.cells[key] = _Cell(features, octave_of(batch_size))
        cell.count = min(cell.count * self._fade(cell) + weight, _MEMORY)
        share = min(weight / cell.count, 1.0)
        cell.seconds += (seconds - cell.seconds) * share
        cell.features = cell.features + (features - cell.features) * share
        cell.step = self.num_steps

    def _fade(self, cell: _Cell) -> float:
        return math.exp(-(self.num_steps - cell.step) / _FORGET_STEPS)

    def predict(self, arms: Sequence[Strategy], batch_size: int, mean_length: float) -> tuple[Array, Array]:
        """Returns means and variances of the arms' log seconds: each [arms]. Without any measurement the mean is the prior's,
        whose constant is arbitrary."""
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

    def counters(self) -> dict[str, Any]:
        """Returns the cells, as JSON."""
        cells = [
            [bucket, length, str(arm), cell.features.tolist(), cell.octave, cell.seconds, cell.count, cell.step]
            for (bucket, length, arm), cell in self.cells.items()
        ]
        return {"num_steps": self.num_steps, "cells": cells}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what `counters` returned."""
        self.num_steps = counters["num_steps"]
        self.cells = {
            (bucket, length, Strategy.parse(arm)): _Cell(np.array(features), *measured)
            for bucket, length, arm, features, *measured in counters["cells"]
        }

    def _neighbours(self, batch_size: int) -> list[_Cell]:
        """Returns the cells nearest in batch size, the latest first among equals."""
        octave = octave_of(batch_size)
        ordered = sorted(self.cells.values(), key=lambda cell: (abs(cell.octave - octave), -cell.step))
        return ordered[:_MAX_NEIGHBOURS]


def _bucket(batch_size: int) -> int:
    """Numbers the batch sizes: 1, 2, 3 and 4 apart, then four numbers to the doubling."""
    return batch_size if batch_size <= 4 else 4 + round(4 * math.log2(batch_size / 4))


def _kernel(a_AF: Array, b_BF: Array) -> Array:
    """Returns the prior covariance [A, B] of the deviations at two sets of features."""
    gaps_AB = (((a_AF[:, None] - b_BF) / _LENGTHS) ** 2).sum(-1)
    result: Array = (a_AF * _SLOPES**2) @ b_BF.T + _BEND**2 * np.exp(-0.5 * gaps_AB)
    return result
