"""Expected tokens per verification, from the acceptance rate at every depth, and their error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    accepted: Sequence[float]
    """P(accepted at depth level + 1 | all before accepted), by level."""
    counts: Sequence[float]
    """Verifications behind each rate."""


class ChainTable(NamedTuple):
    """Expected tokens per verification for chains of 1, 2, … tokens."""

    tokens_D: Array
    spread_DD: Array
    """Change of log(tokens_D) by one standard deviation of the rate at each depth."""
    counts_D: Array
    survivals_D: Array
    """Share of verifications that reaches each depth."""

    @staticmethod
    def of(rates: Rates) -> ChainTable:
        rate_D, count_D = np.array(rates.accepted), np.array(rates.counts)
        survivals_D = np.ones(len(rate_D) + 1)
        rate_D.cumprod(out=survivals_D[1:])
        sums_D = survivals_D.cumsum()
        tokens_D = sums_D[1:]
        beyond_DD = (tokens_D[:, None] - sums_D[:-1]).clip(min=0.0)  # lost if that depth is not survived
        deviation_D = np.sqrt((1.001 - rate_D) / ((rate_D + 0.001) * (count_D + 1)))
        return ChainTable(tokens_D, beyond_DD * deviation_D / tokens_D[:, None], count_D, survivals_D[:-1])


class Expectation(NamedTuple):
    """Expected tokens per verification of A arms, which depend on R rates. Arms that share a rate err
    together."""

    tokens_A: Array
    spread_AR: Array
    """Change of log(tokens_A) by one standard deviation of each rate."""
    counts_R: Array
    survivals_R: Array
    """Share of verifications that reaches each rate's depth."""

    def variance_removed(self, best: int, num_verifications: float) -> Array:
        """By arm: the variance of log(its tokens / the best arm's) that this many verifications of it should
        remove."""
        new_R = num_verifications * self.survivals_R
        seen_AR = (self.spread_AR != 0) * (new_R / (self.counts_R + new_R + 1e-9))
        result: Array = ((self.spread_AR - self.spread_AR[best]) ** 2 * seen_AR).sum(1)
        return result
