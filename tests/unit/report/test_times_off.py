"""The run's times off: predicted step by step, measured in pairs, each with its interval."""

from tests.unit.report.records import record
from tlt.accounts import NAN, OffPair
from tlt.report.times_off import TimesOff


def said(*steps: tuple[float, OffPair]) -> list[str] | None:
    found = TimesOff.of(
        [
            record(i, rollout={"times_off": predicted}, off_pair=vars(pair))
            for i, (predicted, pair) in enumerate(steps, 1)
        ]
    )
    return None if found is None else [f"{name}: {value.plain}" for name, value in found.rows()]


def test_both_figures_have_intervals_and_what_was_predicted_of_the_pairs_stands_beside() -> None:
    pairs = OffPair(2.0, 2.1), OffPair(), OffPair(2.2, 2.3), OffPair(2.42, 2.5)
    assert said(*zip((1.5, 1.6, 1.4, 1.5), pairs, strict=True)) == [
        "times off: 1.50 [1.37, 1.63] predicted, mean of 4 steps",
        ": 2.20 [1.74, 2.79] measured on 3 pairs of rollouts, where 2.29 was predicted",
    ]


def test_one_step_has_no_interval_and_a_fixed_strategy_no_prediction() -> None:
    assert said((1.25, OffPair())) == ["times off: 1.25 predicted, mean of 1 step"]
    assert said((NAN, OffPair(1.25))) == ["times off: 1.25 measured on 1 pair of rollouts"]


def test_with_speculation_off_nothing_is_told() -> None:
    assert said((NAN, OffPair()), (NAN, OffPair())) is None
