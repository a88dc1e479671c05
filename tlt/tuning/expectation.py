"""Tokens per verification, from the chance of every drafted token: what is expected, and by how much that
may err."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """For d = 0, 1, …: the probability that the target accepts the token at depth d + 1, given that it has
    accepted all before it, and the number of verifications behind this estimate."""

    accepted: Sequence[float]
    counts: Sequence[float]


class Table(NamedTuple):
    """For chains of one token, two, …: tokens per verification, and how the standard deviation of the rate at
    each depth changes their logarithm.

    counts_D: verifications behind these rates.
    survivals_D: the share of verifications that comes to each depth.
    """

    tokens_D: Array
    spread_DD: Array
    counts_D: Array
    survivals_D: Array

    @staticmethod
    def of(rates: Rates) -> Table:
        rate_D, count_D = np.array(rates.accepted), np.array(rates.counts)
        survivals_D = np.ones(len(rate_D) + 1)
        rate_D.cumprod(out=survivals_D[1:])
        sums_D = survivals_D.cumsum()
        tokens_D = sums_D[1:]
        beyond_DD = (tokens_D[:, None] - sums_D[:-1]).clip(min=0.0)  # lost if that depth is not survived
        deviation_D = np.sqrt((1.001 - rate_D) / ((rate_D + 0.001) * (count_D + 1)))
        return Table(tokens_D, beyond_DD * deviation_D / tokens_D[:, None], count_D, survivals_D[:-1])


class Expectation(NamedTuple):
    """Tokens per verification of A arms, and by how much the standard deviation of each of R rates changes
    their
    logarithm: arms of one curve err together.

    counts_R: verifications behind each rate.
    survivals_R: the share of verifications that comes to it.
    """

    tokens_A: Array
    spread_AR: Array
    counts_R: Array
    survivals_R: Array

    def learned(self, best: int, num_verifications: float) -> Array:
        """Returns, for each arm, the variance that so many verifications of it are expected to remove from
        the logarithm of its tokens over the best arm's."""
        new_R = num_verifications * self.survivals_R
        seen_AR = (self.spread_AR != 0) * (new_R / (self.counts_R + new_R + 1e-9))
        result: Array = ((self.spread_AR - self.spread_AR[best]) ** 2 * seen_AR).sum(1)
        return result
