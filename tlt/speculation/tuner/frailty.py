"""How unevenly the sequences of a batch accept drafts, and so when the batch ends.

    a sequence's verifications ─▶ its frailty θ ─▶ its tokens per verification ─▶ the steps that it has left
    the steps of all ─▶ a batch that shrinks ─▶ seconds until the slowest sequence ends

Texts easy for the drafter end early; hard texts go on in a small batch. So long drafts may raise tokens per
second now and still prolong the batch.

A draft survives depth d with chance exp(-θ H_d): H_d is the drafter's cumulative hazard, θ the sequence's
frailty (Vaupel, Manton and Stallard, 1979). The prior of θ is exponential, represented by NUM quantiles.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt.speculation.tuner.expectation import Array
from tlt.speculation.tuner.protocol import BatchState

Ints = NDArray[np.int64]

NUM = 8
"""Quantiles of the frailty."""
_MEMORY = 0.9
"""Share of a sequence's evidence left after a verification: texts change. Less brings nothing
(benchmarks/log.md, 2026-11-25)."""
_MOST_DRAWS = 128
"""Most draws x sequences, with 2 to NUM draws: bounds the cost of a decision."""

_FRAILTIES_G: Array = -np.log1p(-(np.arange(NUM) + 0.5) / NUM)
_HAZARDS = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 400)])
_SURVIVALS = np.exp(-np.outer(_HAZARDS, _FRAILTIES_G)).mean(1)
"""Mean over all sequences at each of _HAZARDS."""


def hazards_of(survivals_D: Array) -> Array:
    """Returns the cumulative hazards H_D at which the mean survival over all sequences is survivals_D."""
    result: Array = np.interp(-survivals_D, -_SURVIVALS, _HAZARDS)
    return result


def tokens_of(survivals_D: Array) -> Array:
    """Returns tokens per verification, bonus included, [G, D + 1]: by frailty, for chains of 0, 1, … tokens.

    survivals_D: mean over all sequences.
    """
    survivals_GD = np.exp(-np.outer(_FRAILTIES_G, hazards_of(survivals_D)))
    return np.concatenate([np.ones((NUM, 1)), 1 + survivals_GD.cumsum(1)], axis=1)


class Frailties:
    def __init__(self) -> None:
        self._row_of: dict[Hashable, int] = {}
        self._log_likelihood_RG = np.zeros((0, NUM))

    def keep(self, names: Sequence[Hashable]) -> None:
        if self._row_of.keys() != set(names):
            known, rows = self._log_likelihood_RG, [self._row_of.get(name) for name in names]
            self._row_of = {name: row for row, name in enumerate(names)}
            self._log_likelihood_RG = np.array([np.zeros(NUM) if row is None else known[row] for row in rows])

    def observe(
        self, names: Sequence[Hashable], survivals_D: Array, accepted: Sequence[int], depth: int
    ) -> None:
        """Learns from verifications, in each sequence's order.

        survivals_D: of such drafts, mean over all sequences.
        accepted: a draft shorter than `depth` counts as rejected at its end.
        """
        later: dict[int, int] = {}
        kept, rows, num_later = [], [], []
        for i in reversed(range(len(names))):
            if (row := self._row_of.get(names[i])) is not None:
                kept.append(i)
                rows.append(row)
                num_later.append(later.get(row, 0))
                later[row] = num_later[-1] + 1
        if not kept:
            return
        accepted_V = np.minimum(np.asarray(accepted)[kept], depth)
        hazards_D = np.concatenate([[0.0], hazards_of(survivals_D[:depth])])
        below_VG = np.outer(hazards_D[accepted_V], _FRAILTIES_G)
        step_V = np.append(np.diff(hazards_D), 0.0)[accepted_V].clip(min=1e-6)
        rejected_VG = np.log(-np.expm1(-np.outer(step_V, _FRAILTIES_G)))
        found_VG = np.where((accepted_V < depth)[:, None], rejected_VG, 0.0) - below_VG
        fading_R = _MEMORY ** np.array(list(later.values()))
        self._log_likelihood_RG[list(later)] *= fading_R[:, None]
        np.add.at(self._log_likelihood_RG, rows, found_VG * (_MEMORY ** np.array(num_later))[:, None])

    def _weights(self, names: Sequence[Hashable]) -> Array:
        known_BG = self._log_likelihood_RG[[self._row_of[name] for name in names]]
        weights_BG = np.exp(known_BG - known_BG.max(1, keepdims=True))
        result: Array = weights_BG / weights_BG.sum(1, keepdims=True)
        return result

    def draw(self, names: Sequence[Hashable]) -> Ints:
        """Returns frailties as indices of quantiles, int64[M, B]: evenly spread over each posterior,
        deterministic."""
        below_BG = self._weights(names).cumsum(1)
        num = min(max(_MOST_DRAWS // len(names), 2), NUM)
        places_MB = np.outer((np.arange(num) + 0.5) / num, np.ones(len(names)))
        places_MB = (places_MB + _GOLDEN * np.arange(len(names))) % 1.0
        result: Ints = (below_BG[:, :-1] < places_MB[:, :, None]).sum(2)
        return result


_GOLDEN = (5**0.5 - 1) / 2
"""The fractional parts of the golden ratio's multiples lie evenly in [0, 1)."""


def seconds_to_finish(steps_AMB: Array, first_A: Array, last_A: Array) -> Array:
    """Returns the seconds until all B sequences have ended, [A], mean of M draws.

    steps_AMB: steps left.
    first_A, last_A: seconds of a step of all B sequences, and of the last alone; linear in between.
    """
    each_A = (first_A - last_A) / max(steps_AMB.shape[2] - 1, 1)
    most_A, sum_A = steps_AMB.max(2).mean(1), steps_AMB.sum(2).mean(1)
    result: Array = most_A * (last_A - each_A) + sum_A * each_A
    return result


def speeds_to_finish(
    batch: BatchState, tokens_AMB: Array, now_A: Array, seconds_A: Array, last_A: Array
) -> Array:
    """Returns tokens per second until all sequences have ended, [A].

    tokens_AMB: draws of tokens per verification.
    now_A: tokens per second while waiting requests replace ended sequences.
    seconds_A, last_A: of a step of the whole batch, and of its last sequence alone.
    """
    assert batch.num_left is not None, "it is known how much is left"
    num_left, left_B = batch.num_running * batch.num_left, np.array([one.num_left for one in batch.sequences])
    drained_A = seconds_to_finish(left_B / tokens_AMB, seconds_A, last_A)
    num_waiting = max(num_left - float(left_B.sum()), 0.0)
    result: Array = num_left / (num_waiting / now_A + drained_A)
    return result
