"""Predicts tokens per verification from how many drafted tokens were accepted so far.

The rate at depth d is P(token d accepted | all before it accepted). Products of rates are the survival curve.
A verification is expected to commit the sum of the curve plus one, the bonus token. Chains of one drafter
share a curve, whatever their depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.protocol import ReferenceDraft

Array = NDArray[np.float64]

_FIRST_RATES = {"learned": 0.7, "ngram": 0.1, "hybrid": 0.7, "none": 0.0}
"""Rate assumed at depth 1, by drafter. A depth that is seldom reached takes the rate of the depth before."""
_FOUND = np.array([[1.0], [0.3], [1.0], [0.0]])
"""Share of chains assumed to be drafted to any depth."""
_LEARNED, _HYBRID = 0, 2
_WORTH, _WORTH_OF_RESEMBLED = 2.0, 4.0
"""Verifications that an assumed rate counts as; of the hybrid, whose rates resemble the learned drafter's."""
_ENOUGH = 4.0
"""Verifications after which the learned drafter's rates are known."""
_MEMORY, _MIN_STEPS = 100.0, 6.0
"""Verifications of a drafter after which evidence has faded to 1 / e, and the least engine steps of it: texts
change."""
_MEMORY_STEPS = 150.0
"""Engine steps of any strategy after which it has, so that everything is looked at again."""
_WORTH_OF_OLDER = 16.0
"""Most verifications that evidence about an older policy or drafter counts as."""


class Expectation(NamedTuple):
    tokens_A: Array
    """Per verification, the bonus token included."""
    nodes_A: Array
    """Drafted per sequence."""
    spread_AD: Array
    """Change of log(tokens_A) by one standard deviation of the rate at each depth."""


class AcceptanceModel:
    """counts_KCD: verifications by drafter and depth, of three kinds: came to the depth, accepted its token,
    drafted one, might have."""

    def __init__(self, arms: Sequence[Strategy]) -> None:
        drafting, drafters = [arm.without_reference for arm in arms], list(_FIRST_RATES)
        assert all(arm.width <= 1 for arm in drafting), "chains, no trees"
        self._curve_A = np.array([drafters.index(arm.drafter) for arm in drafting])
        self._depth_A = np.array([arm.depth for arm in drafting])
        self._reach_A = [arm.depth if arm.uses_references else 0 for arm in arms]
        self._is_drafted_AD = np.arange(max(self._depth_A)) < self._depth_A[:, None]
        self.counts_KCD = np.zeros((4, len(drafters), Strategy.MAX_DEPTH))

    def observe(self, strategy: Strategy, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """drafted: less than the strategy's depth where retrieval found less."""
        counts_KD = self.counts_KCD[:, list(_FIRST_RATES).index(strategy.drafter)]
        counts_KD *= math.exp(-min(len(accepted) / _MEMORY, 1 / _MIN_STEPS))
        accepted_B1, drafted_B1 = np.array(accepted)[:, None], np.array(drafted)[:, None]
        levels_D = np.arange(strategy.depth)
        came_D, kept_D = (accepted_B1 >= levels_D).sum(0), (accepted_B1 > levels_D).sum(0)
        drafted_D, num_D = (drafted_B1 > levels_D).sum(0), np.full(strategy.depth, len(accepted))
        counts_KD[:, : strategy.depth] += [came_D, kept_D, drafted_D, num_D]

    @property
    def is_learned_known(self) -> bool:
        return bool(self.counts_KCD[0, _LEARNED, 0] >= _ENOUGH)

    def fade(self, num_steps: int) -> None:
        self.counts_KCD *= math.exp(-num_steps / _MEMORY_STEPS)

    def age(self) -> None:
        """Bounds the evidence, which is of an older policy or drafter."""
        self.counts_KCD *= _WORTH_OF_OLDER / np.maximum(self.counts_KCD[0, :, :1], _WORTH_OF_OLDER)

    def expected(self, batch_size: int, references: Sequence[ReferenceDraft] = ()) -> Expectation:
        """references: one for each sequence that has a reference."""
        came_CD, kept_CD, drafted_CD, num_CD = self.counts_KCD[:, :, : self._is_drafted_AD.shape[1]]
        rates_CD, deviations_CD = _rates(came_CD, kept_CD)
        tokens_CD = 1 + _from_depth_0(rates_CD.cumprod(1))
        found_CD = _from_depth_0((drafted_CD + _FOUND) / (num_CD + 1))
        tokens_A = tokens_CD[self._curve_A, self._depth_A]
        nodes_A = found_CD[self._curve_A, self._depth_A]
        lost_AD = (tokens_A[:, None] - tokens_CD[self._curve_A, :-1]) * self._is_drafted_AD
        spread_AD = lost_AD * deviations_CD[self._curve_A] / tokens_A[:, None]
        if references:
            share_A = 1 - np.sign(self._reach_A) * len(references) / batch_size
            copied_A, kept_A = np.transpose([_copied(reach, references) for reach in self._reach_A])
            both_A = 1 + share_A * (tokens_A - 1) + kept_A / batch_size
            spread_AD = spread_AD * (share_A * tokens_A / both_A)[:, None]
            tokens_A, nodes_A = both_A, share_A * nodes_A + copied_A / batch_size
        return Expectation(tokens_A, nodes_A, spread_AD)

    def variance(self, spread_AD: Array, other: int) -> Array:
        """By arm: the variance of log(its tokens / another's). Arms of one drafter err together."""
        other_AD = np.where((self._curve_A == self._curve_A[other])[:, None], spread_AD[other], 0.0)
        alone = (spread_AD[other] ** 2).sum() - (other_AD**2).sum(1)
        result: Array = ((spread_AD - other_AD) ** 2).sum(1) + alone
        return result

    def counters(self) -> dict[str, list[list[float]]]:
        return dict(zip(_FIRST_RATES, self.counts_KCD.transpose(1, 0, 2).tolist(), strict=True))

    def restore(self, counters: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self.counts_KCD = np.array(list(counters.values())).transpose(1, 0, 2)


def _rates(came_CD: Array, kept_CD: Array) -> tuple[Array, Array]:
    """Posterior means, and standard deviations of their logarithms."""
    rates = []
    for rate, came_D, kept_D in zip(_FIRST_RATES.values(), came_CD.tolist(), kept_CD.tolist(), strict=True):
        for came, kept in zip(came_D, kept_D, strict=True):
            rates.append(rate := (kept + _WORTH * rate) / (came + _WORTH))
    rates_CD = np.array(rates).reshape(came_CD.shape)
    known_D = kept_CD[_HYBRID] + _WORTH_OF_RESEMBLED * rates_CD[_LEARNED]
    rates_CD[_HYBRID] = known_D / (came_CD[_HYBRID] + _WORTH_OF_RESEMBLED)
    return rates_CD, np.sqrt((1.001 - rates_CD) / ((rates_CD + 0.001) * (came_CD + _WORTH + 1)))


def _from_depth_0(numbers_CD: Array) -> Array:
    """Sums of what is shallower."""
    sums_CD = np.zeros((len(numbers_CD), 1 + numbers_CD.shape[1]))
    np.cumsum(numbers_CD, 1, out=sums_CD[:, 1:])
    return sums_CD


def _copied(reach: int, references: Sequence[ReferenceDraft]) -> tuple[float, float]:
    """Tokens drafted from all references, and expected to be accepted."""
    return sum(min(reach, one.length) for one in references), sum(one.expected(reach) for one in references)
