"""The leader watches a phase by what the replicas tell with their heartbeats."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.rollout.phase_parts import PATIENCE, make_queues
from tlt.base.records import IdleUse
from tlt.training.report.progress import Doing, PhaseProgress, ReplicaProgress
from tlt.training.rollout.watch import progress_of, watching


def test_the_leader_hears_what_all_replicas_tell_until_the_phase_ends() -> None:
    queues, told, is_told = make_queues(2), [], threading.Event()
    for queue in queues:
        queue.begin("rollout 0", 4)
    queues[0].heartbeats.tells = ReplicaProgress(3, 500, 90, Doing.GENERATE).encode
    queues[1].heartbeats.tells = ReplicaProgress(5, 700, 0, Doing.TRAIN).encode

    def tell(progress: PhaseProgress | None) -> None:
        told.append(progress)
        is_told.set()

    for queue in queues:
        queue.take(1)  # which beats
    with watching(queues[0].heartbeats, 16, tell):
        assert is_told.wait(PATIENCE)
    first, *_, last = told
    assert (first.finished, first.total, first.longest, first.speed) == (8, 16, 90, None)
    assert first.ranks == "ranks: 1 generating, 1 training the drafter"
    assert last is None


@pytest.mark.parametrize(
    ("use", "num_received", "doing", "longest"),
    [
        (None, 0, Doing.GENERATE, 12),
        (None, 2, Doing.TAKE_OVER, 12),
        (IdleUse.AHEAD, 0, Doing.AHEAD, 0),
        (IdleUse.TRAIN, 2, Doing.TRAIN, 0),
        (IdleUse.REST, 0, Doing.REST, 0),
    ],
)
def test_a_replicas_progress_says_what_it_does_and_its_longest_response_of_this_phase(
    use: IdleUse | None, num_received: int, doing: Doing, longest: int
) -> None:
    engine: Any = SimpleNamespace(running=[SimpleNamespace(num_tokens=n) for n in (4, 12)])
    work: Any = SimpleNamespace(num_received=num_received)
    stats: Any = SimpleNamespace(num_tokens=99)
    ended: Any = SimpleNamespace(rollouts=[object()] * 3)
    idle: Any = SimpleNamespace(use=use)
    assert progress_of(engine, stats, work, ended, idle) == ReplicaProgress(3, 99, longest, doing)
