"""Responses that go from one replica to another: which ones, and that their tokens stay the same."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lossless.helpers import CONFIG
from tests.unit.training.rollout.phase_parts import (
    PARAMS,
    POLICY,
    TREES,
    make_engine,
    make_phase,
    make_problems,
    make_queues,
    running,
    wait_for,
)
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Request, Rollout
from tlt.engine.own.engine import RolloutEngine
from tlt.models.packed import PackedTransformer
from tlt.training.idle.protocol import NO_TRAINING
from tlt.training.rollout.phase import NO_WORK
from tlt.training.rollout.work import FinishedResponses, ReplicaWork, worth_migrating


@pytest.mark.parametrize("speculates", [True, False])
def test_a_replica_that_runs_dry_takes_over_running_responses(
    speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has all the work and the other none. Everything is finished once, with the tokens that one alone
    would give."""
    monkeypatch.setattr("tlt.training.rollout.work_queue.HELP_SECONDS", 0.0)
    problems = make_problems(4)
    alone, _ = make_engine(strategy=Strategy.OFF)
    requests = [[Request(problem.problem_id, 0, problem.prompt_ids, PARAMS)] for problem in problems]
    expected = {
        rollout.problem_id: rollout.token_ids for rollout in alone.generate(group[0] for group in requests)
    }
    queues, works, offered = make_queues(2), [], threading.Event()
    engines: list[RolloutEngine] = []
    offer = queues[1].offer_help
    queues[1].offer_help = lambda: (offer(), offered.set())[0]

    def replica(index: int) -> Callable[[], tuple[list[Rollout], Any]]:
        engine, _ = make_engine(strategy=TREES if speculates else Strategy.OFF)
        engines.append(engine)
        step = engine.step

        def step_when_help_is_offered(captures: bool = False) -> list[Finished]:
            wait_for(offered)
            return step(captures)

        engine.step = step_when_help_is_offered
        phase = make_phase(engine, queues[index])
        queues[index].begin("rollout", len(problems))
        works.append(ReplicaWork(queues[index], requests))
        while index == 0 and engine.room:  # a full engine never sees that the queue is empty
            engine.add(works[0].take(1))
        take = works[index].take

        def take_back_only_when_idle(room: int) -> list[Request]:
            taken = take(room)
            assert index == 1 or engine.is_idle or not taken
            return taken

        works[index].take = take_back_only_when_idle
        ended = FinishedResponses(problems, requests, phase.sinks, NO_TRAINING)
        idle_time = phase.build_idle_time(NO_WORK)
        return lambda: (ended.rollouts, phase.generate(works[index], ended, idle_time))

    with running(replica(0), replica(1)) as results:
        pass
    found = [rollout for rollouts, _ in results for rollout in rollouts]
    assert len(found) == len(problems)
    assert {rollout.problem_id: rollout.token_ids for rollout in found} == expected
    assert works[1].num_received > 0
    drafts = [draft for rollout in found for draft in rollout.drafts or ()]
    accepted = sum(engine.stats.survivors_by_depth.total() for engine in engines)
    assert sum(draft.num_accepted for draft in drafts) == accepted
    assert len(drafts) == sum(engine.stats.num_drafts for engine in engines)
    assert speculates == (len(drafts) > 0)
    assert all(queue.all_done() for queue in queues)
    assert not any(work.unit_of for work in works)


def test_half_of_the_responses_migrate_but_none_that_is_nearly_done() -> None:
    assert worth_migrating([(10, 90)], 1) == []
    assert worth_migrating([(10, 90), (20, 80)], 1) == [0], "the one that is cheaper to read again"
    assert worth_migrating([(60, 40), (20, 80)], 1) == [1]
    assert worth_migrating([(60, 40), (70, 30)], 1) == []
    assert worth_migrating([(50, 50), (10, 90), (40, 60), (20, 80), (30, 70)], 1) == [1, 4], (
        "short and long ones"
    )
    assert worth_migrating([(60, 40), (10, 90), (70, 30), (20, 80), (80, 20), (90, 10)], 1) == [1, 3]
    assert [len(worth_migrating([(10, 90)] * 12, num_offers)) for num_offers in (1, 2, 3, 20)] == [
        6,
        4,
        3,
        1,
    ], "equal parts"


def test_what_waits_for_a_slot_is_handed_over_first() -> None:
    """Three of eight run; of what waits as much goes as makes both even, and comes from its end."""
    engine = RolloutEngine(PackedTransformer(CONFIG, torch.float64), max_batch_size=3)
    engine.load_policy(dict(POLICY.named_parameters()))
    group = [Request("p0", i, (3, 4, 5), PARAMS) for i in range(8)]
    busy, idle = make_queues(2)
    works = []
    for queue in (busy, idle):
        queue.begin("rollout", 1)
        works.append(ReplicaWork(queue, [group]))
    engine.add(works[0].take(1))
    engine.step()
    idle.offer_help()
    engine.waiting = deque(
        replace(request, routes=bytes([request.sample_index])) for request in engine.waiting
    )
    works[0].share(engine, busy.num_offers())
    taken = works[1].take(1)
    assert [request.sample_index for request in taken] == [7, 6, 5, 4]
    assert [request.routes for request in taken] == [b"\7", b"\6", b"\5", b"\4"]
    assert engine.num_waiting == 1
    assert len(engine.running) == 3
