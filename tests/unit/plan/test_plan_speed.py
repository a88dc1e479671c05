"""The arithmetic of `tlt plan speed`: against sums by hand and a count token by token, and on a record."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.plan_speed import leave_one_out, paper_rows
from tests.unit.report.records import record
from tlt.config.load import load_config
from tlt.plan.recorded import RecordedRun, TunedPace, assume_recorded, beside, tuner_of
from tlt.plan.speed import (
    ACCEPT_LENGTHS,
    ALONE,
    OFF,
    PAPER_ERRORS,
    TLT,
    Assumed,
    Errors,
    Expected,
    GpuPace,
    Groups,
    RolloutTime,
    draw_steps,
    expect,
    keep,
    log_normal,
    share,
)
from tlt.speculative.strategy import BatchState, StepOutcome, Strategy
from tlt.tuning.cost_model import CostModel

CONFIG = load_config("recipes/countdown/headline.toml")
CHAIN = Strategy("ngram", 15, 1, 15)


def one_second(num: int, mean_length: float, may_draft: bool) -> float:
    return 1.0


def a_second_for_each(num: int, mean_length: float, may_draft: bool) -> float:
    return float(num)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_takes_its_pace_for_every_token_as_responses_end() -> None:
    """Three decode two tokens, then two decode three, then one decodes four."""
    assert share([2, 9, 5], 1, 8, a_second_for_each, True) == RolloutTime(2 * 3 + 3 * 2 + 4 * 1, 0.0)
    assert share([2, 9, 5], 1, 8, one_second, True).seconds == 9
    assert share([2, 9, 5], 1, 1, one_second, True).seconds == 16, "one after the other"
    assert share([4, 4, 3], 1, 2, one_second, True).seconds == 7, "the third begins when two have ended"


def test_replicas_that_share_have_equally_many_and_idle_where_fewer_are_alive() -> None:
    assert share([10] * 4, 2, 8, a_second_for_each, True) == RolloutTime(10 * 2, 0.0)
    assert share([2, 10], 2, 8, one_second, True) == RolloutTime(10.0, 8.0)
    assert share([2, 10, 10], 4, 8, one_second, True) == RolloutTime(10.0, 2 * 1 + 8 * 2)


def test_replicas_that_keep_their_problems_wait_for_the_longest() -> None:
    assert keep([[10] * 4], 2, 8, a_second_for_each, True) == RolloutTime(40.0, 40.0), "one is dealt nothing"
    assert keep([[2, 3], [10], [4]], 2, 8, one_second, True) == RolloutTime(10.0, 6.0), "dealt in turn"


def test_the_pace_is_asked_for_the_mean_length_in_the_middle_of_a_stretch() -> None:
    asked = list[tuple[int, float]]()

    def note(num: int, mean_length: float, may_draft: bool) -> float:
        asked.append((num, mean_length))
        return 1.0

    share([4, 10, 6, 5], 1, 2, note, False)
    assert asked[:2] == [(2, 2.0), (2, (7 + 3) / 2)], (
        "from four on, one is four tokens older; both end at ten"
    )
    assert asked[2:] == [(1, 2.5)], "the last one is alone"


@pytest.mark.parametrize("seed", range(5))
def test_a_count_token_by_token_says_the_same(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(17)]
    for num_replicas, width in itertools.product((1, 2, 5), (1, 3, 20)):
        waiting, alive, seconds, idle = list(lengths), list[int](), 0.0, 0.0
        while waiting or alive:
            while waiting and len(alive) < num_replicas * width:
                alive.append(waiting.pop(0))
            took = 1.0 + -(-len(alive) // num_replicas)
            seconds += took
            idle += took * max(num_replicas - len(alive), 0)
            alive = [left - 1 for left in alive if left > 1]
        assert share(lengths, num_replicas, width, lambda num, *_: 1.0 + num, True) == RolloutTime(
            seconds, idle
        )


def test_more_replicas_never_lengthen_a_rollout_and_sharing_never_lengthens_it_either() -> None:
    draw = random.Random(1)
    groups = [[draw.randint(1, 50) for _ in range(3)] for _ in range(12)]
    lengths = [length for group in groups for length in group]
    taken = [share(lengths, num, 4, a_second_for_each, True).seconds for num in (1, 2, 4, 8, 36)]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] == max(lengths)
    for num in (1, 2, 4, 8):
        shared = share(lengths, num, 64, a_second_for_each, True)
        assert shared.seconds <= keep(groups, num, 64, a_second_for_each, True).seconds


# ── lengths ──────────────────────────────────────────────────────────────────────────────────────────────


def test_recorded_steps_come_again_as_they_were_and_others_are_drawn_from_them() -> None:
    known = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert draw_steps(known, (2, 2), 8, seed=0) == known
    drawn = draw_steps(known, (50, 2), 3, seed=0)
    assert [len(groups) for groups in drawn] == [50] * 3
    assert drawn == draw_steps(known, (50, 2), 3, seed=0) != draw_steps(known, (50, 2), 3, seed=1)
    problems = [{(length + 1) // 2 for length in group} for groups in drawn for group in groups]
    assert all(len(of_one) == 1 for of_one in problems), "a group is drawn from one problem"
    assert set().union(*problems) == {1, 2, 3, 4}


def test_log_normal_lengths_have_the_median_the_percentile_and_the_cap_that_were_asked_for() -> None:
    lengths = log_normal(100, 800, 1000, 2000)
    assert lengths == sorted(lengths)
    assert lengths[1000] == pytest.approx(100, rel=0.01)
    assert lengths[1900] == pytest.approx(800, rel=0.02)
    assert lengths[-1] == 1000


# ── a machine that nobody has measured ───────────────────────────────────────────────────────────────────


def test_the_gpu_like_curve_costs_what_the_paper_measured_and_drafts_less_for_larger_batches() -> None:
    pace = GpuPace(0.02, 512)
    assert pace(1, 100, False) == 0.02
    assert pace(1024, 100, False) == 0.04
    of_one = 0.02 * (1.42 + 0.067 * 12 + 0.0026 * 64)
    assert pace.seconds(12, 64, 1) == pytest.approx(of_one)
    assert pace(1, 100, True) == pytest.approx(of_one / ACCEPT_LENGTHS[12, 64])
    times = [pace(num, 100, False) / pace(num, 100, True) for num in (1, 8, 64, 512)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 1.0, "where drafts do not pay, none are made"


def test_the_range_without_a_run_reaches_what_the_papers_table_needs() -> None:
    needed = [row["needed"] for row in paper_rows()]
    assert PAPER_ERRORS.low <= min(needed)
    assert max(needed) <= PAPER_ERRORS.high < 1.1 * max(needed)


# ── what a run has measured ──────────────────────────────────────────────────────────────────────────────


def tuner(seconds_of_a_draft: float = 0.02) -> CostModel:
    model, batch = CostModel([Strategy.OFF, CHAIN]), BatchState(1, 200.0, 0, 0)
    for _ in range(150):
        model.observe(Strategy.OFF, batch, StepOutcome(1, (), (), 0.01))
        model.observe(CHAIN, batch, StepOutcome(6, (5,), (15,), seconds_of_a_draft))
    return model


def run_of(lengths: Sequence[Groups], rollouts: Sequence[float], model: CostModel) -> RecordedRun:
    steps = [record(i, rollout={"seconds": took}, step_seconds=took + 3.0) for i, took in enumerate(rollouts)]
    return RecordedRun(CONFIG, steps, [{"tuner": model.counters()}] * 2, lengths)


def test_a_recorded_pace_is_that_of_the_arm_that_the_tuner_would_choose() -> None:
    for seconds, times in ((0.02, 3.0), (0.2, 1.0)):
        pace = TunedPace([tuner(seconds)])
        assert pace(1, 200.0, False) == pytest.approx(0.01, rel=0.05)
        assert pace(1, 200.0, False) / pace(1, 200.0, True) == pytest.approx(times, rel=0.15)


def test_the_runs_own_steps_are_told_as_long_as_they_were_and_a_slower_run_as_much_slower() -> None:
    draw = random.Random(2)
    groups = [[[draw.randint(1, 200) for _ in range(4)] for _ in range(8)] for _ in range(4)]
    run = run_of(groups, [1.0] * 4, tuner())
    pace = TunedPace([tuner_of(state, CONFIG) for state in run.ranks])
    said = [seconds for _, seconds in beside(run, pace)]
    found = {}
    for slower in (1.5, 3.0):
        luck = zip(said, (0.8, 1.0, 1.2), strict=True)
        rollouts = [9.0, *(slower * seconds * by for seconds, by in luck)]
        run = run_of(groups, rollouts, tuner())
        assumed = replace(assume_recorded(run, CONFIG), steps=groups[1:])
        row = expect(assumed, 2, 8, num_steps=8)
        assert [one.variant for one in row.variants] == [OFF, ALONE, TLT]
        found[slower] = row.variants[-1]
        assert found[slower].rollout_seconds == pytest.approx(sum(rollouts[1:]) / 3)
        assert found[slower].seconds == pytest.approx(sum(rollouts[1:]) / 3 + 3.0)
        assert assumed.tlt.low == pytest.approx(0.82 * slower, rel=0.01)
        assert assumed.tlt.high == pytest.approx(1.18 * slower, rel=0.01)
        assert assumed.off is not None
        assert assumed.off == replace(assumed.tlt, low=1.0), "as long as the tuners say, at the least"
    assert found[3.0].rollout_seconds == pytest.approx(2 * found[1.5].rollout_seconds)


def test_nothing_is_said_of_off_where_a_run_hardly_ran_without_drafts() -> None:
    model = CostModel([Strategy.OFF, CHAIN])
    for _ in range(20):
        model.observe(Strategy.OFF, BatchState(1, 200.0, 0, 0), StepOutcome(1, (), (), 0.01))
    assumed = assume_recorded(run_of([[[3] * 4] * 8], [1.0], model), CONFIG)
    assert assumed.off is None
    assert [one.variant for one in expect(assumed, 2, 8, 1).variants] == [ALONE, TLT]
    assert any("nothing is said of off" in line for line in assumed.lines)


def test_a_factor_has_the_range_of_its_steps_and_two_drafted_variants_are_slow_together() -> None:
    first, tlt = Expected(OFF, 30.0, 25.0, 40.0, 27.0, 0.0), Expected(TLT, 15.0, 10.0, 20.0, 12.0, 0.0)
    beside_off = tlt.beside(first)
    assert (beside_off.times, beside_off.times_low, beside_off.times_high) == (2.0, 25 / 20, 40 / 10)
    beside_alone = tlt.beside(replace(first, variant=ALONE))
    assert (beside_alone.times_low, beside_alone.times_high) == (40 / 20, 25 / 10)


def test_steps_are_corrected_by_the_others_alone() -> None:
    pairs = [(2.0, 1.0), (4.0, 1.0), (9.0, 3.0)]
    assert leave_one_out(pairs) == [(2.0, 13 / 4), (4.0, 11 / 4), (9.0, 3 * 6 / 2)]


def test_errors_multiply_rollouts_alone() -> None:
    assumed = Assumed([[[10]]], one_second, 1, 8, Errors(2.0, 1.0, 3.0), Errors(1.0, 0.5, 1.5), 7.0, (), "")
    off, _, tlt = expect(assumed, 1, 1, 1).variants
    assert (off.low, off.seconds, off.high) == (17.0, 27.0, 37.0)
    assert (tlt.low, tlt.seconds, tlt.high) == (12.0, 17.0, 22.0)
