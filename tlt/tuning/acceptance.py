"""The tokens of an engine step, from measured acceptance. It knows no seconds."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tlt.types import Strategy

Array = NDArray[np.float64]

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
        for octave in (_ANY, octave_of(len(accepted))):
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
        octave = octave_of(batch_size)
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


def octave_of(batch_size: int) -> int:
    return round(math.log2(batch_size))
