"""Paired measurements: the interval of their ratio."""

from __future__ import annotations

import math

import numpy as np

from tlt.training.report.ratio import Ratio


def test_an_interval_covers_the_true_ratio_nineteen_times_of_twenty() -> None:
    """2,000 intervals of 6 paired rounds: between 93.5 % and 96.5 % cover (3 standard errors)."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        ratio = Ratio.of(list(np.exp(math.log(1.3) + rng.normal(0, 0.2, size=6))))
        assert ratio.low < ratio.mean < ratio.high
        covered += ratio.low <= 1.3 <= ratio.high
    assert 0.935 < covered / 2000 < 0.965
