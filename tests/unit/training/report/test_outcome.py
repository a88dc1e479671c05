"""The run's speedup by speculation, measured in pairs, with its interval."""

import pytest

from tests.unit.training.report.records import record
from tlt.base.records import SpeedupPair
from tlt.training.report.outcome import speedup_of, told_speedup


@pytest.mark.parametrize(
    ("speedups", "told"),
    [
        ((2.0, None, 2.2, 2.42), "2.20 [1.74, 2.79], measured on 3 pairs of rollouts"),
        ((1.5, 1.25), "1.37 [0.43, 4.36], not resolved, measured on 2 pairs of rollouts"),
        ((None, 1.25), "1.25, measured on 1 pair of rollouts"),
        ((None, None), None),
    ],
)
def test_a_run_tells_the_mean_of_its_pairs_and_whether_they_say_which_is_faster(
    speedups: tuple[float | None, ...], told: str | None
) -> None:
    pairs = [SpeedupPair() if one is None else SpeedupPair(one, 4, 100, 0, 0.5) for one in speedups]
    found = speedup_of([record(step, speedup=vars(pair)) for step, pair in enumerate(pairs, 1)])
    assert (None if found is None else told_speedup(found).plain) == told
