"""What a simulation takes from a run: how much longer its steps took than its tuners expected."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.unit.test_report import record
from tlt.config.load import load_config
from tlt.simulate.recorded import RecordedRun, measured_by, optimism_of
from tlt.tuning.cost_model import CostModel
from tlt.types import BatchState, Lead, StepOutcome, Strategy

CHAIN = Strategy("ngram", 15, 1, 15)
CONFIG = load_config("recipes/countdown/headline.toml")


def test_optimism_is_what_the_tuners_expected_over_what_came() -> None:
    names = ("strategy_seconds", "strategy_speed", "strategy_predicted")
    first = {"off": 2.0, "a": 1.0}, {"off": 100.0, "a": 200.0}, {"off": 150.0, "a": 100.0}
    second = {"off": 2.0, "b": 5.0}, {"off": 300.0, "b": 7.0}, {"off": 450.0, "b": math.nan}
    steps = [record(i, **dict(zip(names, values, strict=True))) for i, values in enumerate((first, second))]
    run = RecordedRun(Path(), CONFIG, steps, [], [])
    expected, came = 2 * 150 + 1 * 100 + 2 * 450, 2 * 100 + 1 * 200 + 2 * 300
    assert optimism_of(run) == pytest.approx(expected / came)
    assert optimism_of(RecordedRun(Path(), CONFIG, [record(0)], [], [])) == 1.0, "nothing was expected"


def test_steps_are_longer_and_what_references_win_is_more_by_as_much_as_the_tuner_was_too_optimistic() -> None:
    model, batch = CostModel([Strategy.OFF, CHAIN]), BatchState(1, 200.0, 0, 0)
    for _ in range(50):
        model.observe(Strategy.OFF, batch, StepOutcome(1, (), (), 0.01))
        model.observe(CHAIN, batch, StepOutcome(3, (2,), (15,), 0.02))
    rank = {"tuner": model.counters()}
    as_expected, real = (measured_by(rank, CONFIG, 1.1, optimism) for optimism in (1.0, 1.5))
    assert real.seconds(CHAIN, 15.0, 1, 200.0) == pytest.approx(1.5 * as_expected.seconds(CHAIN, 15.0, 1, 200.0))
    following = BatchState(1, 200.0, 0, 0, leads=(Lead(0.999, 200),))
    (arm, otherwise), (same, otherwise_real) = as_expected.choose(following), real.choose(following)
    assert arm == same
    assert arm.follows
    assert otherwise is not None
    assert otherwise_real == pytest.approx(otherwise / 1.5)
    assert real.choose(batch)[1] is None
