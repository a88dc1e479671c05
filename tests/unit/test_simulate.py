"""The simulator: against times computed by hand, against a scheduler written down again, and against the real engine."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.lossless.helpers import make_engine, make_policy
from tests.unit.phase_parts import Scorers, make_coordinators
from tests.unit.phase_parts import make_phase as make_real_phase
from tlt.accounts import IdleUse
from tlt.config.load import load_config
from tlt.drafter.drafting.references import References
from tlt.simulate.assumptions import Agreement, Assumptions, Followed, LogNormalLengths, RecordedLengths, SpotSpeed
from tlt.simulate.engine import SimulatedEngine
from tlt.simulate.expectation import OFF, VARIANTS, expect, simulate
from tlt.simulate.gpu import ACCEPT_LENGTHS, GpuSeconds, assume_gpu, make_model, rate_of
from tlt.simulate.measured import Measured
from tlt.simulate.rollout import Replicas, Variant
from tlt.simulate.virtual import VirtualTime
from tlt.tuning.acceptance import Curve
from tlt.tuning.cost_model import CostModel
from tlt.tuning.step_costs import Work
from tlt.types import BatchState, Problem, Request, Rollout, SamplingParams, Strategy

TLT = Variant("TLT")
ALONE = Variant("without hand-over", speculates=False, migrates=False)
POLL = 0.05
"""Seconds after which a replica that waits has noticed what has happened."""
IDENTICAL = Agreement({1: Followed(1e9, 1e9, 1.0), 2: Followed(1e9, 1e9, 1.0)}, 0.4)
FOLLOW = Strategy("ahead", 32, 1, 32)
NO_TRAINING = SpotSpeed(0.0, 0.0, 0.0, 128, 0)


def one_second(arm: Strategy, nodes: float, batch_size: int, mean_length: float) -> float:
    return 1.0


def a_second_for_each(arm: Strategy, nodes: float, batch_size: int, mean_length: float) -> float:
    return float(batch_size)


def assume(groups: Sequence[Sequence[int]], seconds: Any = one_second, **changes: Any) -> Assumptions:
    """Every step has these lengths; steps outside of the rollout take no time."""
    values = {
        "lengths": RecordedLengths([groups] * 8),
        "engines": [Measured(CostModel([Strategy.OFF], explores=False), seconds)],
        "agreement": IDENTICAL,
        "spot": NO_TRAINING,
        "num_samples": len(groups[0]),
        "max_batch_size": 64,
        "max_tokens": 10_000,
        "prompt_tokens": 1,
        "read_seconds": 0.0,
        "other_seconds": [0.0],
        "references_mib": 64.0,
    }
    return Assumptions(**{**values, **changes})


def seconds_of(assumed: Assumptions, variant: Variant, num_replicas: int) -> float:
    num_problems = len(assumed.lengths.of_step(0, 1, 1)) if isinstance(assumed.lengths, RecordedLengths) else 4
    return Replicas(assumed, variant, num_replicas, num_problems_of(assumed) or num_problems).take_step(0).rollout_seconds


def num_problems_of(assumed: Assumptions) -> int:
    assert isinstance(assumed.lengths, RecordedLengths)
    return len(assumed.lengths.steps[0])


# ── virtual time ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_run_in_the_order_of_their_moments_and_of_two_at_once_the_one_that_slept_first() -> None:
    time, seen = VirtualTime(), list[tuple[float, str]]()

    def work(name: str, *naps: float) -> None:
        for nap in naps:
            time.sleep(nap)
            seen.append((time.now, name))

    time.run([lambda: work("a", 2.0, 2.0), lambda: work("b", 1.0, 1.0, 3.0)])
    assert seen == [(1.0, "b"), (2.0, "a"), (2.0, "b"), (4.0, "a"), (5.0, "b")]


def test_a_nap_ends_once_when_another_wakes_it_and_a_sleep_never() -> None:
    time, seen = VirtualTime(), list[tuple[float, str]]()

    def naps() -> None:
        for _ in range(2):
            time.nap(5.0)
            seen.append((time.now, "nap"))

    def sleeps() -> None:
        time.sleep(3.0)
        seen.append((time.now, "sleep"))

    def wakes() -> None:
        time.sleep(2.0)
        for worker in (0, 0, 1):
            time.wake(worker)

    time.run([naps, sleeps, wakes])
    assert seen == [(2.0, "nap"), (3.0, "sleep"), (7.0, "nap")]


def test_an_error_in_one_worker_ends_all_and_is_raised() -> None:
    time = VirtualTime()

    def fails() -> None:
        time.sleep(1.0)
        raise RuntimeError("of this worker")

    def sleeps_on() -> None:
        for _ in range(10**6):
            time.sleep(1.0)

    with pytest.raises(RuntimeError, match="of this worker"):
        time.run([fails, sleeps_on])
    assert time.now <= 2.0


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_replica_takes_the_sum_of_what_it_decodes_one_by_one_and_the_longest_of_a_batch() -> None:
    assert seconds_of(assume([[3], [5]], max_batch_size=1), ALONE, 1) == 8.0
    assert seconds_of(assume([[3, 5]]), ALONE, 1) == 5.0
    assert seconds_of(assume([[3], [5]]), ALONE, 1) == 6.0, "half of what is left is taken: the second begins a step later"


def test_two_replicas_take_as_long_as_the_longer_response_and_one_idles_for_the_rest() -> None:
    step = Replicas(assume([[2], [10]]), ALONE, 2, 2).take_step(0)
    assert step.rollout_seconds == pytest.approx(10.0, abs=POLL)
    assert step.idle_seconds == pytest.approx(8.0, abs=POLL)
    assert step.num_tokens == 12


def test_handing_over_halves_what_is_left_where_a_batch_costs_in_proportion() -> None:
    """Four responses in one unit: a step of four costs 4 s, then two replicas have two each, for 2 s a step."""
    assumed = assume([[10, 10, 10, 10]], a_second_for_each)
    assert seconds_of(assumed, ALONE, 2) == pytest.approx(40.0, abs=POLL)
    step = Replicas(assumed, replace(ALONE, migrates=True), 2, 1).take_step(0)
    assert step.rollout_seconds == pytest.approx(4.0 + 9 * 2.0, abs=2 * POLL)
    assert step.num_migrated == 2


def test_an_offer_of_help_is_noticed_at_the_end_of_the_step_under_way() -> None:
    """Steps of four cost 4 s: an offer after 30 s is accepted after 32, when 192 of 200 tokens are left to two replicas."""
    step = Replicas(assume([[200] * 4, [30]], a_second_for_each), replace(ALONE, migrates=True), 2, 2).take_step(0)
    assert step.rollout_seconds == pytest.approx(32.0 + 192 * 2.0, abs=2 * POLL)


def test_what_is_handed_over_is_read_again() -> None:
    """One token of the prompt at first, once; then two responses, each with the prompt and a token of its own; 1 s a token."""
    assumed = assume([[10, 10, 10, 10]], a_second_for_each, read_seconds=1.0, max_tokens=10)
    step = Replicas(assumed, replace(ALONE, migrates=True), 2, 1).take_step(0)
    assert step.rollout_seconds == pytest.approx(1 + 4 + 2 * (1 + 1) + 9 * 2, abs=2 * POLL)


def test_spot_training_fills_idle_time_up_to_its_passes_and_slows_only_whom_it_is_said_to() -> None:
    spot = SpotSpeed(1.0, 0.5, 2.0, 128, 0)
    trains = replace(ALONE, trains=True)
    step = Replicas(assume([[2], [40]], spot=spot), trains, 2, 2).take_step(0)
    assert step.idle_seconds == pytest.approx(38.0, abs=POLL)
    assert step.trained_seconds == pytest.approx(2.0 * 2), "two passes over the two tokens that were ready"
    assert step.rollout_seconds == pytest.approx(40.0, abs=POLL)
    beside = assume([[2], [40]], spot=replace(spot, train=0.01, max_passes=None), interference=0.5, per_host=2)
    assert Replicas(beside, trains, 2, 2).take_step(0).rollout_seconds == pytest.approx(2 + 1.5 * 38, abs=2.0)


def test_ahead_of_identical_references_reads_in_a_few_steps_what_idle_time_has_generated() -> None:
    """A response of 100 tokens keeps one replica for 100 s; the other has one of 2, and generates 98 tokens of the next step's.
    They are read 33 at a time; the step after that finds what little idle time was left then."""
    model = CostModel([Strategy.OFF, FOLLOW], explores=False)
    for nodes in (1, 2, 4, 8, 16, 32):
        for _ in range(20):
            model.costs.observe(Work(Strategy("ahead", nodes, 1, nodes), 1, 64, 1 + nodes, 0), 1.0)
            model.costs.observe(Work(Strategy.OFF, 1, 64, 1, 0), 1.0)
    assumed = assume([[100], [2]], engines=[Measured(model, one_second)])
    replicas = Replicas(assumed, Variant("ahead", ahead=1), 2, 2)
    first, second, third = (replicas.take_step(step) for step in range(3))
    assert first.rollout_seconds == pytest.approx(100.0, abs=POLL)
    assert first.ahead_seconds == pytest.approx(98.0, abs=1.0)
    num_known = 98
    assert second.rollout_seconds == pytest.approx(read_steps(100, num_known), abs=1.1)
    assert 90 <= second.followed_by_age["1"] <= num_known
    assert [step.num_tokens for step in (first, second, third)] == [102] * 3, "what is generated ahead is not the step's"
    assert third.rollout_seconds > 90
    alone = [step.rollout_seconds for step in simulate(assumed, TLT, 2, 2, range(3))]
    assert sum(alone) == pytest.approx(300.0, abs=0.1)


def test_adaptive_puts_first_what_the_real_choice_finds_to_be_worth_most_and_measures_what_it_costs_others() -> None:
    adaptive = Variant("adaptive", trains=True, ahead=1, compares=True)
    groups = [[100], [2]]
    for change, first in ((0.3, IdleUse.TRAIN), (0.0, IdleUse.AHEAD)):
        spot = SpotSpeed(0.1, 0.1, 4.0, 128, 0, change)
        model = CostModel([Strategy.OFF], explores=False)
        *_, step = simulate(assume(groups, spot=spot, engines=[Measured(model, one_second)]), adaptive, 2, 2, range(2, 4))
        assert step.order[0] is first
        assert step.worth[first].net == max(worth.net for worth in step.worth.values())
    quick = Measured(CostModel([Strategy.OFF], explores=False), lambda *of: 0.05)
    costs = []
    for interference in (0.0, 0.3):
        spot = SpotSpeed(0.001, 0.0, None, 128, 0)
        assumed = assume([[2000], [2]], engines=[quick], spot=spot, interference=interference, per_host=2)
        step = Replicas(assumed, Variant("TLT", trains=True), 2, 2).take_step(0)
        costs.append(step.worth[IdleUse.TRAIN].cost)
    assert costs == [0.0, pytest.approx(math.log(1.3), abs=0.03)]


def test_in_a_crowd_an_offer_of_help_is_noticed_and_so_is_the_end() -> None:
    """Of 40 replicas 38 have nothing to do from the second step on. The other two hand over one response after each step, so
    that steps have 16, 15, … of them, until all have one."""
    groups = [[1] * 16] * 38 + [[200] * 16] * 2
    step = Replicas(assume(groups, a_second_for_each), replace(ALONE, migrates=True), 40, 40).take_step(0)
    assert step.num_migrated == 30
    assert step.rollout_seconds == pytest.approx(sum(range(1, 17)) + 200 - 16, abs=POLL)


def read_steps(length: int, num_known: int, chain: int = 32) -> int:
    """Engine steps of a response that follows an identical reference."""
    num, steps = 0, 0
    while num < length:
        num += min(chain, max(num_known - num, 0)) + 1
        steps += 1
    return steps


# ── against others ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(4))
def test_without_handing_over_units_go_to_whoever_is_free_first(seed: int) -> None:
    """A list scheduler in five lines says the same, for batches of one."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(20)]
    for num_replicas in (1, 2, 5):
        free = [0] * num_replicas
        for length in lengths:
            free[free.index(min(free))] += length
        found = seconds_of(assume([[n] for n in lengths], max_batch_size=1), ALONE, num_replicas)
        assert found == pytest.approx(max(free), abs=POLL)


def test_more_replicas_never_lengthen_a_step_whose_batches_cost_the_same() -> None:
    draw = random.Random(1)
    assumed = assume([[draw.randint(1, 50)] for _ in range(24)], max_batch_size=2)
    for variant in (ALONE, replace(ALONE, migrates=True)):
        taken = [seconds_of(assumed, variant, num) for num in (1, 2, 4, 8, 24)]
        assert all(later <= before + POLL for before, later in itertools.pairwise(taken)), taken
        assert taken[-1] == pytest.approx(max(assumed.lengths.of_step(0, 24, 1))[0], abs=POLL)


def test_the_simulated_engine_takes_the_real_engines_steps_and_finishes_in_its_order() -> None:
    """The real phase on the tiny model says how long responses are; with these lengths the simulated one does the same."""
    problems = [Problem(f"p{index}", (3, 4, 5 + index)) for index in range(6)]
    params = SamplingParams(0.7, max_tokens=24)
    real = make_engine(make_policy(), max_batch_size=4)
    ended = {name: list[tuple[str, int]]() for name in ("real", "simulated")}
    (coordinator,) = make_coordinators(1)
    phase = make_real_phase(real, coordinator)
    result = phase.run(problems, 2, params, "rollout", 0)
    scorers = phase.receivers.scorers
    assert isinstance(scorers, Scorers)
    ended["real"] = scorers.keys
    length_of = {(r.problem_id, r.sample_index): len(r.token_ids) for r in result.rollouts}
    time = VirtualTime()
    what = (
        Measured(CostModel([Strategy.OFF], explores=False), one_second),
        lambda request: length_of[key(request)],
        4,
        0.0,
        False,
        0,
    )
    simulated = SimulatedEngine(time, *what)
    phase = make_real_phase(simulated, make_coordinators(1)[0])

    def run_phase() -> None:
        phase.run(problems, 2, params, "rollout", 0)

    time.run([run_phase])
    scorers = phase.receivers.scorers
    assert isinstance(scorers, Scorers)
    ended["simulated"] = scorers.keys
    assert ended["simulated"] == ended["real"]
    assert (simulated.stats.num_steps, simulated.stats.num_tokens) == (result.stats.num_steps, result.stats.num_tokens)
    assert time.now == result.stats.num_steps


def key(request: Request | Rollout) -> tuple[str, int]:
    return request.problem_id, request.sample_index


def test_what_is_handed_over_goes_on_where_it_was_with_the_same_differences_from_its_reference() -> None:
    references, time = References(), VirtualTime()
    agreement = Agreement({1: Followed(20.0, 5.0, 5.0)}, 0.4)
    request = Request("p", 0, (1,), SamplingParams(max_tokens=200), "rollout", 1)
    references.keep(request.key, range(150), 0)
    ends = agreement.ends(request.key, 1, 150)
    assert ends == agreement.ends(request.key, 1, 150)
    assert ends == sorted(ends)
    model = CostModel([Strategy.OFF], explores=False)
    engines = [SimulatedEngine(time, Measured(model, one_second), lambda r: 150, 4, 0.0, False, seed) for seed in (0, 1)]
    for engine in engines:
        engine.references, engine.agreement, engine.policy_version = references, agreement, 1
        engine.max_steps = 1
    engines[0].add([request])
    for _ in range(10):
        engines[0].step()
    before = engines[0].running[0]
    engines[1].add(engines[0].withdraw([0]))
    engines[1].step()
    after = engines[1].running[0]
    assert (after.num_tokens, after.ends, after.age) == (11, before.ends, 1)


# ── the GPU-like machine ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_speculative_step_costs_what_the_paper_measured_at_batch_one() -> None:
    seconds = GpuSeconds(0.02, 512)
    assert seconds(Strategy.OFF, 0, 1, 100) == 0.02
    assert seconds(Strategy("learned", 8, 8, 64), 64, 1, 100) == pytest.approx(0.02 * (1.42 + 0.067 * 8 + 0.0026 * 64))
    assert seconds(Strategy.OFF, 0, 1024, 100) == 0.04


def test_the_tuner_of_the_gpu_knows_the_papers_accept_lengths_and_chooses_less_for_larger_batches() -> None:
    model = make_model(GpuSeconds(0.02, 512))
    assert len({budget for _, budget in ACCEPT_LENGTHS}) == len(ACCEPT_LENGTHS), "trees of one budget share a survival curve"
    for (depth, budget), accept_length in ACCEPT_LENGTHS.items():
        assert sum(rate_of(accept_length, depth) ** d for d in range(depth + 1)) == pytest.approx(accept_length)
        rates = model.acceptance.rates(Curve.of(Strategy("learned", depth, 8, budget), 3)).accepted[:depth]
        tokens, survival = 1.0, 1.0
        for rate in rates:
            survival *= rate
            tokens += survival
        assert tokens == pytest.approx(accept_length, rel=0.03)
    measured = Measured(model, GpuSeconds(0.02, 512))
    chosen = [measured.choose(BatchState(batch, 500.0, 0, 0))[0].budget for batch in (1, 16, 128)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 16 > chosen[-1]


def make_gpu(seed: int = 0) -> Assumptions:
    config = load_config("countdown", {"rollout.max_batch_size": 16})
    return replace(assume_gpu(config, GpuSeconds(0.02, 512), LogNormalLengths(40, 300, 300)), seed=seed)


def test_the_same_seed_gives_the_same_times_whatever_the_threads_do_and_another_seed_others() -> None:
    found = [expect(make_gpu(seed), 3, 4, num_steps=1) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0].variants != found[2].variants
    assert [one.variant for one in found[0].variants] == [variant.name for variant in VARIANTS]
    assert found[0].variants[0].times_first == 1.0
    assert all(one.times_first > 1.2 for one in found[0].variants[1:]), "speculation pays in small batches"


def test_a_step_generates_every_response_once_and_simulating_it_alone_changes_nothing() -> None:
    assumed = make_gpu()
    (third,) = simulate(assumed, OFF, 2, 4, range(2, 3))
    lengths = assumed.lengths.of_step(2, 4, assumed.num_samples)
    assert third.num_tokens == sum(map(sum, lengths))
    *_, again = simulate(assumed, OFF, 2, 4, range(3))
    assert again.rollout_seconds == pytest.approx(third.rollout_seconds, abs=POLL)


def test_recorded_steps_come_again_as_they_were_and_larger_ones_are_drawn_from_them() -> None:
    lengths = RecordedLengths([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    assert lengths.of_step(1, 2, 2) == [[5, 6], [7, 8]]
    drawn = lengths.of_step(0, 50, 2)
    assert drawn == lengths.of_step(0, 50, 2) != lengths.of_step(1, 50, 2)
    assert {tuple(sorted(set(group))) for group in drawn} <= {
        pair for low in (1, 3, 5, 7) for pair in ((low,), (low + 1,), (low, low + 1))
    }


def test_log_normal_lengths_have_the_median_the_percentile_and_the_cap_that_were_asked_for() -> None:
    lengths = sorted(n for group in LogNormalLengths(100, 800, 1000).of_step(0, 5000, 4) for n in group)
    assert lengths[10_000] == pytest.approx(100, rel=0.05)
    assert lengths[19_000] == pytest.approx(800, rel=0.06)
    assert lengths[-1] == 1000
