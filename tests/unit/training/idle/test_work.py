"""What a rank does with its idle time, and when it rests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tlt.base.records import AheadReport, DrafterReport, IdleUse
from tlt.base.spans import Span
from tlt.training.idle.choice import IdlePlan
from tlt.training.idle.protocol import Ahead, DrafterTraining
from tlt.training.idle.work import IdleTime, IdleWork
from tlt.training.report.timeline import Timeline

AHEAD, TRAIN, REST = IdleUse.AHEAD, IdleUse.TRAIN, IdleUse.REST


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
