"""The rollout phase and idle time: who trains when, how it ends, and how the time is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.training.rollout.phase_parts import (
    OneTokenEngine,
    ScriptedSpot,
    generate,
    make_phase,
    make_problems,
    make_queues,
)
from tlt.base.records import DrafterReport
from tlt.engine.stats import EngineStats
from tlt.training.rollout.protocol import BetweenTurns
from tlt.training.rollout.result import PhaseResult, ReplicaReport


def test_a_replica_that_runs_dry_trains_before_anything_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one engine step: after its last token come no further engine step and no wait."""
    events: list[str] = []
    idle, busy = make_queues(2)
    monkeypatch.setattr(idle, "rest", lambda: events.append("wait"))
    busy.begin("rollout", 4)
    held = busy.take(1)
    trained = iter(range(3))
    spot = ScriptedSpot(lambda: busy.finish(held[0]) if next(trained) == 2 else None, events)
    rollouts, _, report = generate(make_phase(OneTokenEngine(events=events), idle), make_problems(4), spot)
    assert events == ["generate p1", "generate p2", "generate p3", "train", "train", "train"]
    assert [rollout.problem_id for rollout in rollouts] == ["p1", "p2", "p3"]
    assert report.num_micro_steps == 3, "and goes on until the last response of all"


class LateWork:
    """A queue that holds one unit, and another one once `appear` was called."""

    def __init__(self) -> None:
        self.units, self.unfinished = [0], 2

    def begin(self, name: str, num_units: int) -> None: ...
    def heartbeat(self) -> None: ...
    def offer_help(self) -> None: ...
    def rest(self) -> None: ...
    def num_offers(self) -> int:
        return 0

    def appear(self) -> None:
        self.units.append(1)

    def take(self, room: int) -> list[int]:
        return [self.units.pop()] if self.units else []

    def has_news(self, offers_help: bool = False) -> bool:
        return bool(self.units) or self.all_done()

    def finish(self, unit: int) -> None:
        self.unfinished -= 1

    def all_done(self) -> bool:
        return self.unfinished == 0


def test_training_gives_way_to_new_work_and_goes_on_after_it() -> None:
    queue, events = LateWork(), []
    queue.unfinished = 3  # the third is another replica's
    script = iter([lambda: None, queue.appear, lambda: None, lambda: queue.finish(2)])

    def micro_step() -> None:
        next(script)()

    spot = ScriptedSpot(micro_step, events)
    _, _, report = generate(make_phase(OneTokenEngine(events=events), queue), make_problems(2), spot)
    assert events == ["generate p0", "train", "train", "generate p1", "train", "train"]
    assert report.num_micro_steps == 4


def test_replicas_on_hosts_whose_clocks_count_from_other_starts_are_compared_on_one() -> None:
    """The second host was started 499,000 s later: without the shift a rollout of seconds lasts six days."""
    here = ReplicaReport(
        500_000.0, 500_010.0, 500_013.0, EngineStats(), DrafterReport(1, 9, 1.0, preempted_at=500_012.5)
    )
    there = ReplicaReport(1000.0, 1012.0, 1013.0, EngineStats(), DrafterReport())
    result = PhaseResult([], [], [here, there.shifted(499_000.0)])
    assert result.seconds == pytest.approx(13.0)
    assert result.idle_seconds == pytest.approx(2.0)
    assert result.preemption_seconds == pytest.approx((0.5,))
    shifted = here.shifted(-499_000.0)
    assert (shifted.drafter.preempted_at, shifted.start) == (1012.5, 1000.0)


def test_idle_time_before_new_work_counts_and_so_does_the_training_in_it() -> None:
    """4 s without work of which 3 trained, work, and 2 s at the end, where the trainer overran by one."""
    replica = ReplicaReport(
        0.0, 10.0, 13.0, EngineStats(), DrafterReport(9, 9, 6.0), gap_seconds=4.0, gap_training=3.0
    )
    other = ReplicaReport(0.0, 12.0, 13.0, EngineStats(), DrafterReport())
    result = PhaseResult([], [], [replica, other])
    assert result.idle_seconds == pytest.approx(4.0 + 2.0)
    assert result.drafter_seconds == pytest.approx(3.0 + 2.0)


def test_preemption_is_measured_from_the_last_response_of_all_where_a_trainer_was_at_work() -> None:
    def replica(last_token: float, preempted_at: float | None) -> ReplicaReport:
        return ReplicaReport(
            0.0, last_token, 11.0, EngineStats(), DrafterReport(1, 9, 2.0, preempted_at=preempted_at)
        )

    replicas = [replica(10.0, None), replica(4.0, 10.03), replica(5.0, 10.001), replica(9.0, 8.5)]
    result = PhaseResult([], [], replicas)
    assert result.preemption_seconds == pytest.approx((0.03, 0.001)), (
        "the last one had gone back to generating at 8.5"
    )
    assert result.idle_seconds == pytest.approx(0 + 6 + 5 + 1)


def test_a_replica_that_waits_for_its_tools_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool may take longer than run.timeout_seconds."""

    class Waiting(BetweenTurns):
        is_waiting = True

    (queue,) = make_queues(1)
    phase = make_phase(OneTokenEngine(), queue)
    beats = list[bool]()
    monkeypatch.setattr(queue, "heartbeat", lambda: beats.append(True))
    queue.begin("rollout", 1)
    phase._has_better_to_do()
    assert not beats
    phase.sinks = replace(phase.sinks, between_turns=Waiting())
    phase._has_better_to_do()
    assert beats
