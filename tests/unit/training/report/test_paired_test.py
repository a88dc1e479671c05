"""The paired sign-flip test."""

import itertools
import math

import numpy as np
import pytest

from tlt.training.report.paired_test import paired_sign_flip_test


def brute_force_p(before: list[float], after: list[float]) -> float:
    differences = [b - a for a, b in zip(before, after, strict=True)]
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in patterns]
    return sum(value >= sum(differences) - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_sign_flip_test_equals_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    before, after = (generator.integers(0, 5, 9) / 4 for _ in range(2))
    assert paired_sign_flip_test(before.tolist(), after.tolist()) == brute_force_p(
        before.tolist(), after.tolist()
    )


def test_the_sampled_sign_flip_test_agrees_with_the_exact_one() -> None:
    generator = np.random.default_rng(1)
    before = generator.random(14)
    after = before + generator.normal(0.15, 0.4, 14)
    exact = paired_sign_flip_test(before, after)
    sampled = paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)
    assert 0.01 < exact < 0.9
    assert abs(sampled - exact) < 5 * math.sqrt(
        exact * (1 - exact) / 16_000
    )  # wrong once in 10^6; the seed is fixed
    assert sampled == paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)


def test_the_sign_flip_test_knows_its_extremes() -> None:
    assert paired_sign_flip_test([0.0] * 10, [1.0] * 10) == 2**-10
    assert paired_sign_flip_test([1.0] * 10, [0.0] * 10) == 1.0
    assert paired_sign_flip_test([0.5] * 300, [0.5] * 300) == 1.0
    assert paired_sign_flip_test([0.0] * 256, [1.0] * 256, num_permutations=999) == 1 / 1000
    with pytest.raises(ValueError, match="2 scores before and 1 after"):
        paired_sign_flip_test([1, 2], [1])
    with pytest.raises(ValueError, match="not finite"):
        paired_sign_flip_test([1.0], [math.nan])
