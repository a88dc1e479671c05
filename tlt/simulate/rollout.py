"""Takes steps of many replicas under virtual time. The decisions are the real phase's own: its loop, queue, handing over,
generating ahead, the tuner's choice. What is simulated is the clock, the engine, the drafter's training and the update.

    for each step:   replica 0 ─ RolloutPhase ─ Work ─ Coordinator ┐
                     replica 1 ─ RolloutPhase ─ …                  ├─ one store, one VirtualTime ─▶ StepResult
                     …                 └ SimulatedEngine, Training ┘
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import HashStore

from tlt.accounts import DrafterCheck, IdleStretch, IdleUse, TimedStep
from tlt.distributed.world import World
from tlt.drafter.drafting.references import References
from tlt.report.timeline import Timeline
from tlt.simulate.assumptions import Assumptions
from tlt.simulate.engine import SimulatedEngine
from tlt.simulate.looks import LookingCoordinator, Looks
from tlt.simulate.replica import AheadLike, NoScorers, NotedAhead, SharedAheadQueue, Training
from tlt.simulate.virtual import VirtualTime
from tlt.training.rollout.ahead import AheadOfPolicy
from tlt.training.rollout.idle_choice import REST_SECONDS, IdleChoice, IdlePlan, Worth
from tlt.training.rollout.idle_time import IdleWork, facts_of
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import NO_AHEAD, Ahead, DrafterSide, Receivers
from tlt.training.rollout.result import PhaseResult, ReplicaReport
from tlt.training.rollout.slowdown import add_up, sums_of
from tlt.training.rollout.work import Ended, Work
from tlt.types import Key, Problem, Request, SamplingParams

_LONGEST = 10.0
"""Seconds after which an idle replica looks for news where there is none."""
_WATCHFUL_STEPS = 4
"""Steps that are simulated together where the idle work of others may slow them."""
_ACCEPTANCE = 0.7
"""Of the drafter, from which its change by training is told; only their ratio counts."""


@dataclass(frozen=True)
class Variant:
    """What the replicas do. ahead: steps.  trains: whether the drafter is trained in idle time.  compares: whether the use of
    idle time that is worth most comes first, as with rollout.ahead = "adaptive"."""

    name: str
    speculates: bool = True
    migrates: bool = True
    trains: bool = False
    ahead: int = 0
    compares: bool = False

    @property
    def uses(self) -> tuple[IdleUse, ...]:
        """The uses of idle time that there are."""
        there_is = {IdleUse.AHEAD: self.ahead > 0, IdleUse.TRAIN: self.trains}
        return tuple(use for use, is_there in there_is.items() if is_there)


@dataclass(frozen=True)
class StepResult:
    """A simulated step. Idle seconds, those trained in them, and those spent ahead are summed over replicas.

    rollout_seconds: from the beginning to the last token; the last return comes within an engine step or a micro-step of it.
    followed_by_age: tokens kept of references.  worth: what each use of idle time was worth afterwards, for all that was known.
    order: of the uses in this step.
    """

    rollout_seconds: float
    other_seconds: float
    idle_seconds: float
    trained_seconds: float
    ahead_seconds: float
    num_tokens: int
    num_migrated: int
    followed_by_age: Mapping[str, int]
    worth: Mapping[IdleUse, Worth]
    order: tuple[IdleUse, ...]

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.other_seconds


class Replicas:
    """So many replicas that take steps, one after the other. A step is that number of an endless sequence."""

    def __init__(self, assumed: Assumptions, variant: Variant, num_replicas: int, num_problems: int) -> None:
        self.assumed, self.variant = assumed, variant
        self.num, self.num_problems = num_replicas, num_problems
        self.time, self.store = VirtualTime(), HashStore()
        self.params = SamplingParams(max_tokens=assumed.max_tokens, seed=assumed.seed)
        self.references = References(assumed.references_mib)
        self.working: set[int] = set()
        self.done_ahead: set[int] = set()
        self._lengths: dict[int, dict[Key, int]] = {}
        indices = range(num_replicas)
        self.engines = [self._engine(index) for index in indices]
        self.looks = Looks(self.time, self.engines)
        self.coordinators = [LookingCoordinator(self.looks, self.store, index, num_replicas) for index in indices]
        self.training = [Training(assumed.spot, coordinator, self.working) for coordinator in self.coordinators]
        for index, engine in enumerate(self.engines):
            engine.sleep_steps = partial(self._sleep_steps, index)
        may_slow = assumed.interference > 0 and min(assumed.per_host, num_replicas) > 1
        self.choice = IdleChoice(variant.uses, variant.compares, may_slow)

    def _engine(self, index: int) -> SimulatedEngine:
        assumed = self.assumed
        measured = assumed.engines[index % len(assumed.engines)]
        what = assumed.max_batch_size, assumed.read_seconds, self.variant.speculates, assumed.seed * 100_003 + index
        engine = SimulatedEngine(self.time, measured, self._length_of, *what)
        if assumed.interference:
            engine.max_steps = _WATCHFUL_STEPS
        engine.slowdown = lambda: self._slowdown(index)
        if self.variant.ahead:
            engine.references, engine.agreement = self.references, assumed.agreement
        return engine

    def take_step(self, step: int) -> StepResult:
        """Simulates a step, and what is generated ahead of the next."""
        requests = self._requests(step)
        plan = self.choice.plan(step)
        self.looks.longest = REST_SECONDS / 2 if plan.rest else _LONGEST
        later = [r for s in range(step + 1, step + 1 + self.variant.ahead) for group in self._requests(s) for r in group]
        past = [request for group in requests for request in group]
        self.done_ahead = set()
        reports: list[ReplicaReport | None] = [None] * self.num

        problems = [Problem(group[0].problem_id, ()) for group in requests]
        aheads = self._aheads(later, past)
        steps: list[list[TimedStep]] = [[] for _ in range(self.num)]

        def work(index: int) -> None:
            idle = IdleWork(aheads[index], plan)
            reports[index], steps[index] = self._generate(index, f"rollout {step}", problems, requests, idle)

        self.time.run([partial(work, index) for index in range(self.num)])
        aheads[0].keep([ahead.take_found() for ahead in aheads])
        for ahead in aheads:
            ahead.end()
        return self._result(step, [report for report in reports if report is not None], aheads[0].num_offered, steps, plan)

    def _generate(
        self, index: int, name: str, problems: Sequence[Problem], requests: Sequence[Sequence[Request]], idle: IdleWork
    ) -> tuple[ReplicaReport, list[TimedStep]]:
        """Runs one replica's part of a phase, from its beginning to where it would wait for the others."""
        engine, coordinator, training = self.engines[index], self.coordinators[index], self.training[index]
        world = World(index, self.num, 0, torch.device("cpu"), self.store, None)
        timeline = Timeline(index, clock=self.time.clock)
        receivers = Receivers(NoScorers(), lambda token_ids: "")
        phase = RolloutPhase(world, engine, coordinator, receivers, timeline, lambda: False, self.variant.migrates)
        drafter = training if self.variant.trains else DrafterSide()
        engine.stats = type(engine.stats)()
        start = self.time.now
        drafter.begin()
        coordinator.begin(name, len(requests))
        idle.ahead.begin(SharedAheadQueue(coordinator.store, self.done_ahead))
        work = Work(coordinator, requests)
        ended = Ended(problems, receivers, drafter)
        spare = phase.idle_time(idle, drafter)
        last_token, steps = phase.generate(work, ended, drafter, spare)
        report = ReplicaReport(
            start,
            last_token,
            self.time.now,
            engine.stats,
            spare.drafter_report,
            gap_seconds=work.gap_seconds,
            gap_training=work.gap_training,
            num_migrated=work.num_received,
            ahead=spare.ahead_report,
            idle=tuple(spare.stretches),
        )
        return report, steps

    def _aheads(self, later: Sequence[Request], past: Sequence[Request]) -> list[Ahead]:
        """Returns who generates ahead. All share the references, so one drops those of this step for all."""
        if not later:
            return [NO_AHEAD] * self.num
        first = AheadOfPolicy(self.engines[0], self.references, self.num, later, past, {})
        aheads = [first, *(AheadLike(first, engine) for engine in self.engines[1:])]
        return [NotedAhead(ahead, index, self.working) for index, ahead in enumerate(aheads)]

    def _result(
        self, step: int, reports: list[ReplicaReport], num_offered: int, steps: Sequence[Sequence[TimedStep]], plan: IdlePlan
    ) -> StepResult:
        slowdown = add_up(sums_of(own, self._idle_beside(index, reports)) for index, own in enumerate(steps))
        phase = PhaseResult([], [], reports, self._check(reports), slowdown=slowdown)
        self.choice.observe(facts_of(phase, num_offered), slowdown)
        lengths = heapq.nlargest(self.assumed.spot.carry_longest, self._lengths.pop(step).values())
        for engine, training in zip(self.engines, self.training, strict=True):
            engine.policy_version = step + 1
            training.carried, training.step_seconds = sum(lengths), phase.seconds
        return StepResult(
            rollout_seconds=phase.last_token - min(report.start for report in reports),
            other_seconds=self.assumed.other_seconds[step % len(self.assumed.other_seconds)],
            idle_seconds=phase.idle_seconds,
            trained_seconds=phase.drafter_seconds,
            ahead_seconds=sum(report.ahead.seconds for report in reports),
            num_tokens=phase.stats.num_tokens,
            num_migrated=sum(report.num_migrated for report in reports),
            followed_by_age=dict(phase.stats.followed_by_age),
            worth=self.choice.worth(),
            order=plan.order,
        )

    def _check(self, reports: Sequence[ReplicaReport]) -> DrafterCheck | None:
        """Returns the measure of a drafter that this step's training has changed as it is assumed to."""
        if not any(report.drafter.seconds for report in reports):
            return None
        before = _ACCEPTANCE - self.assumed.spot.change * (1 + _ACCEPTANCE)
        return DrafterCheck(0, _ACCEPTANCE, math.nan, "trained", before)

    def _idle_beside(self, index: int, reports: Sequence[ReplicaReport]) -> list[tuple[IdleStretch, ...]]:
        """Returns what the others of a replica's host did in their idle time."""
        return [reports[other].idle for other in self._others_of_host(index)]

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

    def _sleep_steps(self, index: int, seconds: float, num: int) -> int:
        return self.looks.steps(index, seconds, num, self.coordinators[index].asks_in)

    def _slowdown(self, index: int) -> float:
        """Returns how much longer a step of a busy replica takes now, for the idle work of others on its host."""
        assumed = self.assumed
        return 1.0 if not assumed.interference or assumed.per_host < 2 else 1.0 + assumed.interference * self._idle_work(index)

    def _idle_work(self, index: int) -> float:
        host = self._others_of_host(index)
        return sum(other in self.working for other in host) / max(len(host), 1)

    def _others_of_host(self, index: int) -> list[int]:
        first = index - index % self.assumed.per_host
        return [other for other in range(first, min(first + self.assumed.per_host, self.num)) if other != index]
