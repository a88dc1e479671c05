"""Estimates with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from tlt.apps.audit.bets import SOURCES

_POWER_TRIALS = 200
_POWER_MAX_TOKENS = 5_000_000


@dataclass(frozen=True)
class Estimate:
    """The interval holds the truth with the verdict's probability 1 − alpha."""

    value: float
    low: float
    high: float


def mean_with_interval(values_T: Tensor, alpha: float) -> Estimate:
    if not len(values_T):
        return Estimate(0.0, 0.0, 0.0)
    mean = float(values_T.mean())
    half = NormalDist().inv_cdf(1 - alpha / 2) * float(values_T.std(correction=0)) / math.sqrt(len(values_T))
    return Estimate(mean, mean - half, mean + half)


def most_likely_share(ratios_RT: Tensor, alpha: float) -> tuple[str, Estimate]:
    """Finds source and share ε for which (1 − ε) p + ε r makes the tokens likeliest.

    If no source beats chance: the source that could hide the largest share. Intervals are
    Bonferroni-corrected for the number of sources. ratios_RT: r(y) / p(y).
    """
    chance = NormalDist().inv_cdf(1 - alpha / len(ratios_RT) / 2) ** 2 / 2  # half of a chi-square's quantile
    found = [_share_of(ratios_T - 1, chance) for ratios_T in ratios_RT]
    is_seen = max(gained for gained, _ in found) > chance
    best = max(range(len(found)), key=lambda source: found[source][0] if is_seen else found[source][1].high)
    return SOURCES[best], found[best][1]


def _share_of(gains_T: Tensor, chance: float) -> tuple[float, Estimate]:
    def likelihood(share: float) -> float:
        return float(torch.log1p(share * gains_T).sum())

    top = 1 - 1e-9
    share = _bisect(lambda s: float((gains_T / (1 + s * gains_T)).sum()) > 0, 0.0, top)  # it is concave
    share = share if share > 1e-8 else 0.0
    gained = likelihood(share)
    low = _bisect(lambda s: likelihood(s) < gained - chance, 0.0, share) if gained > chance else 0.0
    return gained, Estimate(share, low, _bisect(lambda s: likelihood(s) >= gained - chance, share, top))


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def tokens_for_power(
    sums_RK: Tensor, lengths: Sequence[int], log_threshold: float, power: float = 0.95
) -> int | None:
    """Tokens after which the e-process has crossed the threshold in a share `power` of bootstrap runs, which
    resample whole responses. None: over five million, or no bet grows.

    sums_RK: log-growth of every bet over each response.
    lengths: tokens of each response.
    """
    if float(sums_RK.sum(0).max()) <= 0:
        return None
    generator = torch.Generator().manual_seed(0)
    lengths_R = torch.tensor(lengths)
    needed = []
    for _ in range(_POWER_TRIALS):
        wealth_K, num_tokens = torch.zeros(sums_RK.shape[1], dtype=torch.float64), 0
        while num_tokens < _POWER_MAX_TOKENS:
            drawn = torch.randint(len(lengths), (256,), generator=generator)
            wealth_NK = wealth_K + sums_RK[drawn].cumsum(0)
            is_over_N = wealth_NK.logsumexp(-1) - math.log(sums_RK.shape[1]) >= log_threshold
            if bool(is_over_N.any()):
                num_tokens += int(lengths_R[drawn][: int(is_over_N.nonzero()[0]) + 1].sum())
                break
            wealth_K, num_tokens = wealth_NK[-1], num_tokens + int(lengths_R[drawn].sum())
        needed.append(num_tokens)
        if sum(n >= _POWER_MAX_TOKENS for n in needed) > (1 - power) * _POWER_TRIALS:
            return None
    return sorted(needed)[math.ceil(power * _POWER_TRIALS) - 1]
