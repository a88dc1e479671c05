"""Idle time: what a rank does with it, when it rests, what that is worth, and the plan that follows from
it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tlt.base.records import AheadReport, DrafterReport, IdleUse
from tlt.base.spans import Span
from tlt.base.strategy import Strategy
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.protocol import Choice, StepOutcome
from tlt.training.report.timeline import Timeline
from tlt.training.rollout import idle_choice as module
from tlt.training.rollout.idle_choice import IdleChoice, IdleFacts, IdlePlan
from tlt.training.rollout.idle_time import IdleTime, IdleWork, facts_of
from tlt.training.rollout.protocol import Ahead, DrafterTraining
from tlt.training.rollout.result import PhaseResult, ReplicaReport
from tlt.training.rollout.slowdown import SlowdownSums

AHEAD, TRAIN, REST = IdleUse.AHEAD, IdleUse.TRAIN, IdleUse.REST
NOTHING = IdleFacts(0, 0.0, 0, 0.0, 10.0, 1.5, 0.0, 0.0, math.nan, math.nan, 50)
GENERATED = replace(NOTHING, ahead_tokens=10_000, ahead_seconds=10.0, offered_tokens=10_000)
NO_SUMS = SlowdownSums.zero()


class Clock:
    """Time that passes where somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Working(Ahead, DrafterTraining):
    """Works in pieces of 50 ms, until it is to stop or all of its pieces are done."""

    def __init__(self, clock: Clock, pieces: int) -> None:
        self.clock, self.left = clock, pieces
        self.worked: list[float] = []

    def _work(self, should_stop: Callable[[], bool]) -> int:
        done = 0
        while self.left and not should_stop():
            self.worked.append(self.clock.now)
            self.clock.sleep(0.05)
            self.left, done = self.left - 1, done + 1
        return done

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        done = self._work(should_stop)
        return AheadReport(done, 3 * done)

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        return DrafterReport(self._work(should_stop))


def spend(plan: IdlePlan, ahead: int, train: int, seconds: float) -> tuple[IdleTime, list[Span]]:
    clock = Clock()
    timeline, end = Timeline(0, clock=lambda: clock.now), clock.now + seconds
    work = IdleWork(Working(clock, ahead), Working(clock, train), plan)
    idle_time = IdleTime(work, lambda: clock.now >= end, lambda: clock.sleep(0.01), timeline)
    while clock.now < end:
        idle_time.spend()
    idle_time.leave()
    return idle_time, timeline.spans


def seconds_of(idle_time: IdleTime, use: IdleUse) -> float:
    return sum(stretch.end - stretch.start for stretch in idle_time.stretches if stretch.use is use)


def test_what_comes_first_is_done_first_and_what_is_left_of_the_time_is_rest() -> None:
    idle_time, spans = spend(IdlePlan(), ahead=4, train=6, seconds=1.0)
    assert [stretch.use for stretch in idle_time.stretches] == [AHEAD, TRAIN, REST]
    assert seconds_of(idle_time, AHEAD) == pytest.approx(0.2)
    assert seconds_of(idle_time, TRAIN) == pytest.approx(0.3)
    assert seconds_of(idle_time, REST) == pytest.approx(0.5)
    assert idle_time.ahead_report == AheadReport(4, 12, pytest.approx(0.2))
    assert idle_time.drafter_report.num_micro_steps == 6
    assert {span.name for span in spans} == {"ahead", "wait"}


@pytest.mark.parametrize("order", [(AHEAD,), (TRAIN,)])
def test_a_rank_rests_for_the_share_that_the_plan_says(order: tuple[IdleUse, ...]) -> None:
    idle_time, _ = spend(IdlePlan(order, rest=0.25), ahead=1000, train=1000, seconds=8.0)
    assert seconds_of(idle_time, REST) == pytest.approx(2.0, abs=0.3)
    rests = [stretch for stretch in idle_time.stretches if stretch.use is REST]
    assert len(rests) == pytest.approx(10, abs=1)
    assert sum(s.end - s.start for s in idle_time.stretches) == pytest.approx(8.0, abs=0.06)


def test_real_work_ends_a_rest_at_once() -> None:
    idle_time, _ = spend(IdlePlan((TRAIN,), rest=0.25, offset=0.75), ahead=0, train=1000, seconds=0.1)
    assert [stretch.use for stretch in idle_time.stretches] == [REST]
    assert seconds_of(idle_time, REST) == pytest.approx(0.1, abs=0.011)


def test_what_references_have_won_is_known_where_a_tuner_predicts() -> None:
    def facts(predicted: float | None = 9.0) -> IdleFacts:
        stats = EngineStats(won_seconds=4.0)
        stats.record_step(Choice(Strategy.OFF, predicted), StepOutcome(3, (), (), 1.0), 1)
        stats.record_step(Choice(Strategy.OFF), StepOutcome(3, (), (), 1.0), 1)  # before a prediction
        return facts_of(
            PhaseResult([], [], [ReplicaReport(0.0, 5.0, 6.0, stats, DrafterReport())]), num_offered=50
        )

    assert facts().won_seconds == pytest.approx(4.0)
    assert facts(predicted=None).won_seconds is None, "no tuner predicts"
    assert facts().offered_tokens == 50


# ── what it is worth ────────────────────────────────────────────────────────────────────────────────────────


def choice(*uses: IdleUse, compares: bool = True) -> IdleChoice:
    return IdleChoice(uses or (AHEAD, TRAIN), compares, has_neighbours=True)


def costly(use: IdleUse, cost: float, num_steps: int = 3000) -> SlowdownSums:
    """What a regression over so many steps says where this use costs so much."""
    share = np.array([float(use is AHEAD), float(use is TRAIN)])
    xx, noise = num_steps / 4 * np.outer(share, share), 0.2
    return SlowdownSums(
        xx, cost * num_steps / 4 * share, num_steps * noise**2 + cost**2 * num_steps / 4, float(num_steps)
    )


def test_ahead_is_worth_what_its_tokens_have_won_shared_by_the_ranks_at_work() -> None:
    chosen = choice()
    for _ in range(40):
        chosen.observe(replace(GENERATED, won_seconds=6.0), NO_SUMS)
    # a second brings 1,000 tokens, and 1,000 tokens that were offered have won 0.6 s; 1.5 ranks are at work
    assert chosen.worth()[AHEAD].gain == pytest.approx(0.6 / 1.5, rel=0.02)
    idle = replace(NOTHING, rollout_seconds=10.0)
    before = chosen.worth()[AHEAD].gain
    for _ in range(20):
        chosen.observe(idle, NO_SUMS)
    assert chosen.worth()[AHEAD].gain == pytest.approx(before), (
        "what is not done teaches nothing, and is not forgotten either"
    )


def test_the_use_that_is_worth_more_comes_first_and_the_other_has_its_trials() -> None:
    chosen = choice()
    for _ in range(10):
        chosen.observe(
            replace(GENERATED, won_seconds=9.0, train_seconds=5.0, acceptance_before=0.5, acceptance=0.501),
            NO_SUMS,
        )
    plans = [chosen.plan(step).order for step in range(module.TRIAL_EVERY)]
    assert plans[0] == (TRAIN, AHEAD)
    assert plans[1:] == [(AHEAD, TRAIN)] * (module.TRIAL_EVERY - 1)


def test_a_use_that_costs_more_than_it_brings_is_left_but_for_trials() -> None:
    chosen = choice(TRAIN, compares=False)
    facts = replace(NOTHING, train_seconds=5.0, acceptance_before=0.5, acceptance=0.5)
    for _ in range(10):
        chosen.observe(facts, costly(TRAIN, 0.25))
    assert chosen.worth()[TRAIN].cost == pytest.approx(0.25, abs=0.02)
    assert chosen.worth()[TRAIN].gain < 0.25
    orders = [chosen.plan(step).order for step in range(2 * module.TRIAL_EVERY)]
    assert orders.count(()) == 2 * module.TRIAL_EVERY - 2
    assert orders.count((TRAIN,)) == 2


def test_generating_ahead_is_done_where_the_user_asked_for_it_whatever_it_costs() -> None:
    asked, compared = choice(compares=False), choice()
    for chosen in (asked, compared):
        for _ in range(10):
            chosen.observe(replace(GENERATED, won_seconds=-0.5), costly(AHEAD, 0.3))
    assert asked.plan(0).order[0] is AHEAD
    assert AHEAD not in compared.plan(1).order


def test_what_is_known_survives_a_restart() -> None:
    chosen, again = choice(), choice()
    facts = replace(GENERATED, won_seconds=7.0, train_seconds=1.0, acceptance_before=0.6, acceptance=0.61)
    chosen.observe(facts, costly(AHEAD, 0.2))
    again.restore(json.loads(json.dumps(chosen.counters())))
    assert again.worth() == chosen.worth()
    assert again.plan(3) == chosen.plan(3)
