"""Takes steps of many replicas under virtual time. The decisions are the real phase's own: its loop, queue, handing over,
generating ahead, the tuner's choice. What is simulated is the clock, the engine, the drafter's training and the update.

    for each step:   replica 0 ─ RolloutPhase ─ Work ─ Coordinator ┐
                     replica 1 ─ RolloutPhase ─ …                  ├─ one store, one VirtualTime ─▶ StepResult
                     …                 └ SimulatedEngine, Training ┘
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import HashStore

from tlt.accounts import AheadReport, DrafterReport
from tlt.distributed.ahead_queue import AheadQueue
from tlt.distributed.work_queue import Coordinator
from tlt.distributed.world import World
from tlt.drafter.references import References
from tlt.drafter.spot import MicroStepSize
from tlt.report.timeline import Timeline
from tlt.rl.rewards import Key
from tlt.simulate.assumptions import Assumptions
from tlt.simulate.engine import SimulatedEngine
from tlt.simulate.virtual import VirtualTime
from tlt.training.ahead import NO_AHEAD, Ahead, AheadOfPolicy
from tlt.training.drafter_side import DrafterSide
from tlt.training.idle import IdleWork
from tlt.training.phase import RolloutPhase
from tlt.training.result import PhaseResult, ReplicaReport
from tlt.training.work import Ended, Receivers, Work
from tlt.types import Finished, Problem, Request, Reward, SamplingParams, Strategy

_MAX_LOOKS = 40_000
"""Looks around of all replicas in a step, about. Where there would be more, each looks around less often: so simulating many
replicas takes seconds."""
_INSTANT = 1e-6
_GRAIN = 0.02
"""A real replica at work asks for offers of help so often (work_queue.HELP_SECONDS); a simulated one no more often."""


@dataclass(frozen=True)
class Variant:
    """What the replicas do. ahead: steps.  trains: whether the drafter is trained in idle time."""

    name: str
    speculates: bool = True
    migrates: bool = True
    trains: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class StepResult:
    """A simulated step. Idle seconds, those trained in them, and those spent ahead are summed over replicas.

    rollout_seconds: from the beginning to the last token; the last return comes within an engine step or a micro-step of it.
    followed_by_age: tokens kept of references.  grain: seconds between two looks around.
    """

    rollout_seconds: float
    other_seconds: float
    idle_seconds: float
    trained_seconds: float
    ahead_seconds: float
    num_tokens: int
    num_migrated: int
    followed_by_age: Mapping[str, int]
    grain: float

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.other_seconds


class NoScorers:
    """Scores nothing, in no time."""

    def submit(self, key: Key, problem: Mapping[str, Any], text: str, token_ids: Sequence[int], step: int) -> None:
        """Takes a response in."""

    def collect(self) -> dict[Key, Reward]:
        return {}

    def drain(self, patience: float) -> dict[Key, Reward]:
        return {}

    def abandon(self) -> None:
        """Has nothing to forget."""


class Training(DrafterSide):
    """Trains the drafter in virtual time: micro-steps as long as the real trainer would make them, up to its limit of passes.

    carried: tokens of responses that stay from the step before; they have to be recomputed first.  step_seconds: of that step.
    """

    def __init__(self, replicas: Replicas, index: int) -> None:
        self.replicas, self.index = replicas, index
        self.time, self.speed = replicas.time, replicas.assumed.spot
        self.carried, self.step_seconds = 0, 1.0
        self.left = 0.0

    def begin(self, rollout: str) -> None:
        self.left = self.carried * self.speed.recompute + self._passes(self.carried)

    def observe(self, finished: Finished) -> None:
        self.left += self._passes(len(finished.rollout.token_ids))

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        num, start = 0, self.time.now
        while not (is_preempted := should_stop()) and self.left > _INSTANT:
            seconds = min(max(self._micro_step_seconds(), self.replicas.grain), self.left)
            self.replicas.working.add(self.index)
            self.time.sleep(seconds)
            self.left -= seconds
            num += 1
        self.replicas.working.discard(self.index)
        return DrafterReport(num, seconds=self.time.now - start, preempted_at=self.time.now if num and is_preempted else None)

    def _passes(self, num_tokens: int) -> float:
        limit = self.speed.max_passes
        return math.inf if limit is None and num_tokens else (limit or 0.0) * num_tokens * self.speed.train

    def _micro_step_seconds(self) -> float:
        size = MicroStepSize(self.speed.tokens_per_micro_step)
        size.seconds_per_token = self.speed.train
        return self.speed.train * size.num_tokens(self.step_seconds)


class NotedAhead(Ahead):
    """Notes who generates ahead now."""

    def __init__(self, ahead: Ahead, index: int, working: set[int]) -> None:
        self.ahead, self.index, self.working = ahead, index, working

    def begin(self, queue: AheadQueue) -> None:
        self.ahead.begin(queue)

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        self.working.add(self.index)
        report = self.ahead.run(should_stop)
        self.working.discard(self.index)
        return report

    def end(self) -> None:
        self.ahead.end()


class SharedAheadQueue(AheadQueue):
    """Reads what all have done from a set that they share, instead of as many keys of the store."""

    def __init__(self, coordinator: Coordinator, done: set[int]) -> None:
        super().__init__(coordinator.store)
        self._all_done = done

    def note_done(self, numbers: Iterable[int]) -> None:
        self._all_done.update(numbers)

    def done(self) -> set[int]:
        return self._all_done


class PatientCoordinator(Coordinator):
    """Rests no less than a grain, where many replicas are simulated."""

    def __init__(self, replicas: Replicas, index: int) -> None:
        time = replicas.time
        super().__init__(replicas.store, index, replicas.num, math.inf, time.clock, time.sleep)
        self.replicas = replicas

    def rest(self) -> None:
        self.replicas.time.sleep(max(self.pause, self.replicas.grain))


class Replicas:
    """So many replicas that take steps, one after the other. A step is that number of an endless sequence."""

    def __init__(self, assumed: Assumptions, variant: Variant, num_replicas: int, num_problems: int) -> None:
        self.assumed, self.variant = assumed, variant
        self.num, self.num_problems = num_replicas, num_problems
        self.time, self.store = VirtualTime(), HashStore()
        self.params = SamplingParams(max_tokens=assumed.max_tokens, seed=assumed.seed)
        self.references = References(assumed.references_mib)
        self.grain = 0.0
        self.working: set[int] = set()
        self.done_ahead: set[int] = set()
        self._lengths: dict[int, dict[Key, int]] = {}
        indices = range(num_replicas)
        self.engines = [self._engine(index) for index in indices]
        self.training = [Training(self, index) for index in indices]
        self.coordinators = [PatientCoordinator(self, index) for index in indices]

    def _engine(self, index: int) -> SimulatedEngine:
        assumed = self.assumed
        measured = assumed.engines[index % len(assumed.engines)]
        what = assumed.max_batch_size, assumed.read_seconds, self.variant.speculates, assumed.seed * 100_003 + index
        engine = SimulatedEngine(self.time, measured, self._length_of, *what)
        engine.slowdown = lambda: self._slowdown(index)
        if self.variant.ahead:
            engine.references, engine.agreement = self.references, assumed.agreement
        return engine

    def take_step(self, step: int) -> StepResult:
        """Simulates a step, and what is generated ahead of the next."""
        requests = self._requests(step)
        self.grain = self._coarse_grain(step)
        for engine in self.engines:
            engine.grain = self.grain
        later = [r for s in range(step + 1, step + 1 + self.variant.ahead) for group in self._requests(s) for r in group]
        past = [request for group in requests for request in group]
        self.done_ahead = set()
        reports: list[ReplicaReport | None] = [None] * self.num

        aheads = [self._ahead(index, later, past) if later else NO_AHEAD for index in range(self.num)]

        def work(index: int) -> None:
            reports[index] = self._generate(index, f"rollout {step}", requests, aheads[index])

        self.time.run([partial(work, index) for index in range(self.num)])
        for ahead in aheads:
            ahead.end()
        return self._result(step, [report for report in reports if report is not None])

    def _generate(self, index: int, name: str, requests: Sequence[Sequence[Request]], ahead: Ahead) -> ReplicaReport:
        """Runs one replica's part of a phase, from its beginning to where it would wait for the others."""
        engine, coordinator, training = self.engines[index], self.coordinators[index], self.training[index]
        world = World(index, self.num, 0, torch.device("cpu"), self.store, None)
        timeline = Timeline(index, clock=self.time.clock)
        receivers = Receivers(NoScorers(), lambda token_ids: "")
        phase = RolloutPhase(world, engine, coordinator, receivers, timeline, lambda: False, self.variant.migrates)
        drafter = training if self.variant.trains else DrafterSide()
        engine.stats = type(engine.stats)()
        start = self.time.now
        drafter.begin(name)
        coordinator.begin(name, len(requests))
        ahead.begin(SharedAheadQueue(coordinator, self.done_ahead))
        work = Work(coordinator, requests)
        ended = Ended((Problem(group[0].problem_id, ()) for group in requests), receivers, drafter)
        spare = phase._idle_time(IdleWork(ahead), drafter)
        last_token, _ = phase._generate(work, ended, drafter, spare)
        return ReplicaReport(
            start,
            last_token,
            self.time.now,
            engine.stats,
            spare.drafter_report,
            gap_seconds=work.gap_seconds,
            gap_training=work.gap_training,
            num_migrated=work.num_received,
            ahead=spare.ahead_report,
        )

    def _ahead(self, index: int, later: Sequence[Request], past: Sequence[Request]) -> Ahead:
        """Returns who generates ahead. All share the references, so one drops those of this step for all."""
        engine, world = self.engines[index], World(index, self.num, 0, torch.device("cpu"), self.store, None)
        mine = past if index == 0 else ()
        ahead = AheadOfPolicy(engine, self.references, world, later, mine, {})
        return NotedAhead(ahead, index, self.working)

    def _result(self, step: int, reports: list[ReplicaReport]) -> StepResult:
        phase = PhaseResult([], [], reports)
        rollout_seconds = phase.last_token - min(report.start for report in reports)
        lengths = heapq.nlargest(self.assumed.spot.carry_longest, self._lengths.pop(step).values())
        for engine, training in zip(self.engines, self.training, strict=True):
            engine.policy_version = step + 1
            training.carried, training.step_seconds = sum(lengths), phase.seconds
        other = self.assumed.other_seconds[step % len(self.assumed.other_seconds)]
        ahead_seconds = sum(report.ahead.seconds for report in reports)
        trained = phase.drafter_seconds
        num_migrated = sum(report.num_migrated for report in reports)
        counted = ahead_seconds, phase.stats.num_tokens, num_migrated, dict(phase.stats.followed_by_age), self.grain
        return StepResult(rollout_seconds, other, phase.idle_seconds, trained, *counted)

    # ── what a step consists of ──────────────────────────────────────────────────────────────────────────────────────

    def _requests(self, step: int) -> list[list[Request]]:
        """Returns a step's requests, and knows from then on how long their responses are."""
        groups = self.assumed.lengths.of_step(step, self.num_problems, self.assumed.num_samples)
        prompt = (0,) * max(self.assumed.prompt_tokens, 1)
        names = [f"{step}/{number}" for number in range(len(groups))]
        self._lengths[step] = {(name, i): n for name, group in zip(names, groups, strict=True) for i, n in enumerate(group)}
        return [
            [Request(name, i, prompt, self.params, "rollout", step) for i in range(len(group))]
            for name, group in zip(names, groups, strict=True)
        ]

    def _length_of(self, request: Request) -> int:
        return self._lengths[request.policy_step][request.problem_id, request.sample_index]

    def _coarse_grain(self, step: int) -> float:
        """Returns the seconds between two looks around, as if a phase lasted as long as its longest response."""
        longest, engine = max(self._lengths[step].values()), self.engines[0]
        plain = engine.measured.seconds(Strategy.OFF, 0, 1, longest / 2)
        return max(_GRAIN, longest * plain * self.num / _MAX_LOOKS)

    def _slowdown(self, index: int) -> float:
        """Returns how much longer a step of a busy replica takes now, for the idle work of others on its host."""
        assumed = self.assumed
        return 1.0 if not assumed.interference or assumed.per_host < 2 else 1.0 + assumed.interference * self._idle_work(index)

    def _idle_work(self, index: int) -> float:
        first = index - index % self.assumed.per_host
        host = [other for other in range(first, min(first + self.assumed.per_host, self.num)) if other != index]
        return sum(other in self.working for other in host) / max(len(host), 1)
