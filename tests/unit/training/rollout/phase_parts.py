"""Replicas of a rollout phase for the tests of it: engines and trainers whose steps are the test's, and
threads that share a store. They wait for events of each other, never for a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG, make_policy
from tlt.base.records import DrafterReport
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Problem, Request, ResponseId, Reward, Rollout, SamplingParams, Turns
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.forms import new_model, new_packed
from tlt.drafter.measure import DrafterCopies
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import drafter_shape
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.training.idle.drafter_training import LearnedDrafterTraining, Ranks, RankState
from tlt.training.idle.work import IdleWork
from tlt.training.ranks.world import World
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Sinks
from tlt.training.rollout.work import FinishedResponses, ReplicaWork
from tlt.training.rollout.work_queue import WorkQueue

PARAMS = SamplingParams(temperature=0.7, max_tokens=24)
POLICY = make_policy()
TREES = Strategy("learned", 3, 2, 6)
PATIENCE = 60.0
"""Seconds after which a thread that was to act has not: only a failing test waits so long."""


class Scorers:
    """Scores at once, by a function of the token ids."""

    by_group = False

    def __init__(self, score: Callable[[Sequence[int]], float] = lambda token_ids: 1.0) -> None:
        self.score, self.submitted, self._done = score, list[ResponseId](), dict[ResponseId, Reward]()

    def submit(
        self,
        response_id: ResponseId,
        problem: Mapping[str, Any],
        text: str,
        token_ids: Sequence[int],
        step: int,
        turns: Turns | None = None,
    ) -> None:
        self.submitted.append(response_id)
        self._done[response_id] = Reward(self.score(token_ids), True)

    def collect(self) -> dict[ResponseId, Reward]:
        done, self._done = self._done, {}
        return done

    def drain(self, patience: float) -> dict[ResponseId, Reward]:
        return self.collect()

    def complete(self, group: Sequence[ResponseId]) -> None: ...

    def withdraw(self, response_ids: Iterable[ResponseId]) -> None: ...

    def abandon(self) -> None: ...


@dataclass
class OneTokenEngine:
    """Finishes a response per step; `before_step` may wait for others."""

    before_step: Callable[[], None] = lambda: None
    events: list[str] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    room: int = 1
    running: tuple[Any, ...] = ()
    num_waiting: int = 0
    policy_version: int = 0

    def forget(self, response_id: ResponseId) -> None: ...

    @property
    def is_idle(self) -> bool:
        return not self.waiting

    def add(self, requests: Iterator[Request]) -> None:
        self.waiting += requests

    def step(self, captures: bool = False) -> list[Finished]:
        self.before_step()
        request = self.waiting.pop()
        self.events.append(f"generate {request.problem_id}")
        rollout = Rollout(
            request.problem_id, request.sample_index, request.prompt_ids, (1,), (0.0,), "stop", 0
        )
        return [Finished(rollout)]


class ScriptedSpot:
    """A spot trainer whose micro-steps are the test's."""

    def __init__(self, micro_step: Callable[[], None], events: list[str]) -> None:
        self.micro_step, self.events = micro_step, events
        self.trainer = SimpleNamespace(shared_tensors=list, num_tokens=0)

    def add(self, rollout: Rollout, features_TE: torch.Tensor | None) -> None: ...

    def run(self, should_stop: Callable[[], bool], publish: Any = None) -> DrafterReport:
        num_micro_steps = 0
        while not should_stop():
            self.events.append("train")
            self.micro_step()
            num_micro_steps += 1
        return DrafterReport(num_micro_steps, preempted_at=time.perf_counter())


def make_phase(engine: Any, queue: Any, scorers: Scorers | None = None) -> RolloutPhase:
    world, timeline = World(0, 1, 0, torch.device("cpu"), HashStore(), None), Timeline(0)
    scorers = scorers or Scorers()
    return RolloutPhase(world, engine, queue, Sinks(scorers, lambda ids: ""), timeline, lambda: False)


def make_training(
    spot: Any,
    learned: Any = None,
    target: PackedTransformer | None = None,
    average: Callable[[Sequence[torch.Tensor], float], float] = lambda tensors, weight: 1.0,
    others: Sequence[int] = (),
) -> LearnedDrafterTraining:
    """`others`: drafter versions of other replicas' engines. Without a target nothing is measured."""

    def gather(value: Any) -> list[Any]:
        states = [RankState("", version, False) for version in others]
        return [value, *states] if isinstance(value, RankState) else [value]

    copies: Any = None
    if target is not None:
        copies = DrafterCopies(spot.trainer.model, learned.model, target, lambda group, counts: 0)
    learned = learned or SimpleNamespace(vocabulary_choice=None, version=0)
    return LearnedDrafterTraining(copies, learned, spot, Ranks(0, gather, average), Timeline(0))


def make_problems(num: int) -> list[Problem]:
    return [Problem(f"p{index}", (3, 4, 5 + index)) for index in range(num)]


def generate(
    phase: RolloutPhase, problems: Sequence[Problem], spot: Any = None
) -> tuple[list[Rollout], float, DrafterReport]:
    """The part of a phase in which a replica waits for nobody."""
    training = make_training(spot)
    training.begin()
    requests = [[Request(problem.problem_id, 0, problem.prompt_ids, PARAMS)] for problem in problems]
    phase.queue.begin("rollout", len(problems))
    ended = FinishedResponses(problems, requests, phase.sinks, training)
    idle_time = phase.build_idle_time(IdleWork(training=training))
    last_token, _ = phase.generate(ReplicaWork(phase.queue, requests), ended, idle_time)
    return ended.rollouts, last_token, idle_time.drafter_report


def make_queues(num: int) -> list[WorkQueue]:
    store = HashStore()
    return [WorkQueue(store, replica, num, timeout=PATIENCE) for replica in range(num)]


@contextmanager
def running(*targets: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs each in a thread of its own; leaving it waits for all and gives what they returned."""
    results: list[Any] = [None] * len(targets)

    def call(index: int, target: Callable[[], Any]) -> None:
        results[index] = target()

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(targets)]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a replica hangs"


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "the other replica never came"


def make_model(seed: int) -> DraftModel:
    return new_model(drafter_shape(CONFIG)).double().initialize(seed)


def make_engine(seed: int = 2, strategy: Strategy = TREES) -> tuple[RolloutEngine, LearnedDrafter]:
    engine = RolloutEngine(
        PackedTransformer(CONFIG, torch.float64), max_batch_size=4, tuner=FixedTuner(strategy)
    )
    engine.load_policy(dict(POLICY.named_parameters()))
    model = make_model(seed)
    packed = new_packed(model.config, torch.float64)
    packed.load(model.state_dict(), 7)
    learned = LearnedDrafter(packed, engine.target, 4, LearnedSettings(tau=0.7, calibrate=False))
    engine.load_drafter(learned)
    return engine, learned
