"""The paired test whether training helped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def paired_sign_flip_test(
    before: Sequence[float],
    after: Sequence[float],
    num_permutations: int = 100_000,
    seed: int = 0,
) -> float:
    """One-sided p value of the null hypothesis that training changed nothing, from pairs of scores.

    Under it each after - before has either sign with equal probability; p is the share of sign patterns with
    at least the observed mean. Exact, over 2^n patterns of n nonzero differences, up to `num_permutations`;
    else as many random patterns and the observed one (Phipson & Smyth 2010).
    """
    if len(before) != len(after):
        counts = f"{len(before)} scores before and {len(after)} after"
        raise ValueError(f"paired test: {counts}; they must be of the same problems")
    change_P = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if not np.isfinite(change_P).all():
        raise ValueError("paired test: a score is not finite")
    difference_P: NDArray[np.float64] = change_P[change_P != 0]
    num_pairs = len(difference_P)
    observed = difference_P.sum()
    slack = 1e-12 * np.abs(difference_P).sum()  # sums of the same terms in another order are ties

    def count_extreme(is_flipped_MP: NDArray[Any]) -> int:
        return int(((1.0 - 2.0 * is_flipped_MP) @ difference_P >= observed - slack).sum())

    chunk = 4096
    if num_pairs < 60 and 2**num_pairs <= num_permutations:
        num_patterns, bits_P = int(2**num_pairs), np.arange(num_pairs)
        starts = range(0, num_patterns, chunk)
        patterns = (np.arange(start, min(start + chunk, num_patterns)) for start in starts)
        return sum(count_extreme(pattern_M[:, None] >> bits_P & 1) for pattern_M in patterns) / num_patterns
    generator = np.random.default_rng(seed)
    num_extreme = 0
    for start in range(0, num_permutations, chunk):
        shape = (min(chunk, num_permutations - start), num_pairs)
        num_extreme += count_extreme(generator.integers(0, 2, size=shape, dtype=np.int8))
    return (1 + num_extreme) / (1 + num_permutations)
