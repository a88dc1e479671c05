"""After a rollout phase: what stays to train on, and what memory is given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.training.rollout.phase_parts import (
    PARAMS,
    make_engine,
    make_model,
    make_phase,
    make_problems,
    make_queues,
    make_training,
)
from tlt.base.types import Rollout
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.engine.backend import Unfinished
from tlt.training.idle.work import IdleWork
from tlt.training.rollout.phase import StopRequested
from tlt.training.rollout.protocol import Journal


def test_a_step_that_is_broken_off_leaves_what_it_started_with_to_train_on() -> None:
    engine, learned = make_engine()
    trainer = DrafterTrainer(make_model(2), engine.target, PRESETS["hass"])
    carried = [Rollout("before", 0, (3, 4), (5, 6, 7), (0.0,) * 3, "stop", 0)]
    spot = SpotTrainer(trainer, TrajectoryBuffer(10**6), 48)
    spot.end_step(carried, 1.0)
    started = [t.token_ids for t in spot.buffer.trajectories]
    (queue,) = make_queues(1)
    phase = make_phase(engine, queue)
    phase.should_stop = lambda: len(spot.buffer) > 3
    with pytest.raises(StopRequested):
        phase.run(
            make_problems(6),
            2,
            PARAMS,
            "rollout",
            0,
            IdleWork(training=make_training(spot, learned, engine.target)),
        )
    assert [t.token_ids for t in spot.buffer.trajectories] == started == [(3, 4, 5, 6, 7)]
    assert spot.counters()["trajectories"] == [[[3, 4, 5, 6, 7], 2]]


def test_the_journal_is_told_of_running_responses_after_every_step_and_at_a_break_at_once() -> None:
    class Noting(Journal):
        def __init__(self) -> None:
            self.noted: list[tuple[bool, int]] = []

        def note_running(self, responses: Sequence[Unfinished], at_once: bool = False) -> None:
            self.noted.append((at_once, sum(one.num_tokens for one in responses)))

    engine, _ = make_engine()
    phase, journal = make_phase(engine, make_queues(1)[0]), Noting()
    phase.sinks = replace(phase.sinks, journal=journal)
    phase.run(make_problems(2), 2, PARAMS, "rollout", 0)
    assert len(journal.noted) == engine.stats.num_steps > 2
    assert not any(at_once for at_once, _ in journal.noted)
    phase.should_stop = lambda: engine.stats.num_steps > 2
    with pytest.raises(StopRequested):
        phase.run(make_problems(2), 2, PARAMS, "again", 1)
    assert journal.noted[-1] == (True, journal.noted[-2][1])
    assert journal.noted[-1][1] > 0


def test_what_a_broken_off_step_pushed_out_of_the_buffer_comes_back() -> None:
    def rollout(name: str, length: int) -> Rollout:
        return Rollout(name, 0, (3, 4), (5,) * length, (0.0,) * length, "stop", 0)

    buffer = TrajectoryBuffer(8 * 20)
    buffer.carry_over([rollout("before", 10)], 1)
    buffer.add(rollout("new", 17))
    assert [len(t.token_ids) for t in buffer.trajectories] == [19]
    buffer.abandon()
    assert [len(t.token_ids) for t in buffer.trajectories] == [12]


def test_after_a_phase_the_caches_give_their_memory_to_the_policy_update() -> None:
    engine, learned = make_engine()
    (queue,) = make_queues(1)
    make_phase(engine, queue).run(make_problems(6), 2, PARAMS, "rollout", 0)
    assert engine.stats.num_tokens > 0
    caches = (
        engine.cache.groups,
        learned.draft_cache.cache.groups,
        engine.cache.layers,
        learned.draft_cache.cache.layers,
    )
    assert caches == ([], [], [], [])
    assert learned.draft_cache.history.ring_SCF.nbytes == 0
