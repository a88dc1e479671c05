"""The rollout phase: pull, generate, score, train the drafter when idle, average the drafters. Knows no policy update.

    every replica:   take units ─▶ generate ─▶ hand responses to the scorers ─▶ … ─▶ queue empty, nothing running
                        ▲                                                               ▼
                     units handed over by others  ◀──────────────────────────────  offer help
                                                                                        ▼
                     all done?  ◀─ poll between micro-steps ─  train the drafter on what is there
                        ▼
    together:        gather responses and rewards in canonical order ─▶ average the drafters by tokens trained, and measure

The collectives come after the last response; until then a replica waits for nobody. A drafter in training may reach those
that still generate through a mailbox (`DrafterRefresh`); tokens do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tlt.distributed.work_queue import Coordinator
from tlt.distributed.world import World, any_rank, gather_objects
from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.report.timeline import Timeline
from tlt.rl.rewards import Key
from tlt.spans import SpanName
from tlt.training.drafter_side import DrafterSide
from tlt.training.work import Work
from tlt.types import DrafterCheck, DrafterReport, Problem, Purpose, Request, Reward, Rollout, SamplingParams

POLL_SECONDS = 0.002

NO_DRAFTER = DrafterSide()


class Scorers(Protocol):
    """Scores responses while others are generated; `RewardPool` does so in processes."""

    def submit(self, key: Key, problem: Mapping[str, Any], text: str) -> None:
        """Takes a response in, without waiting."""

    def drain(self, patience: float) -> dict[Key, Reward]:
        """Returns the rewards of all that was submitted since the last time."""
        ...

    def abandon(self) -> None:
        """Forgets all that was submitted."""


class StopRequested(Exception):
    """The user asked the run to stop. What the phase generated is dropped: the law gives it again, token for token."""


@dataclass(frozen=True)
class ReplicaReport:
    """Says what one replica did in a phase; times are on the host's monotonic clock.

    gap_seconds: seconds without work before the last token.  gap_training: the part of them in which it trained the drafter.
    num_refreshes: drafters of other replicas that it took up meanwhile.  num_migrated: responses that it took over.
    """

    start: float
    last_token: float
    end: float
    stats: EngineStats
    drafter: DrafterReport
    gap_seconds: float = 0.0
    gap_training: float = 0.0
    num_refreshes: int = 0
    num_migrated: int = 0

    def idle_seconds(self, last_token_of_all: float) -> float:
        return self.gap_seconds + max(last_token_of_all - self.last_token, 0.0)

    def training_seconds(self, last_token_of_all: float) -> float:
        """Returns the part of the idle seconds in which it trained the drafter."""
        at_the_end = min(self.drafter.seconds - self.gap_training, max(last_token_of_all - self.last_token, 0.0))
        return self.gap_training + at_the_end

    def preemption_seconds(self, last_token_of_all: float) -> float | None:
        """Returns the seconds from the last token of all to the trainer's return; None: it was not at work then."""
        preempted_at = self.drafter.preempted_at
        return None if preempted_at is None or preempted_at < last_token_of_all else preempted_at - last_token_of_all


@dataclass(frozen=True)
class PhaseResult:
    """All replicas' responses with their rewards, ordered by (problem id, sample index), and where the time went. `check` is of
    the learned drafter, None where there is none or it was not asked for."""

    rollouts: list[Rollout]
    rewards: list[Reward]
    replicas: list[ReplicaReport] = field(repr=False)
    check: DrafterCheck | None = None

    @property
    def seconds(self) -> float:
        return max(r.end for r in self.replicas) - min(r.start for r in self.replicas)

    @property
    def last_token(self) -> float:
        return max(r.last_token for r in self.replicas)

    @property
    def idle_seconds(self) -> float:
        """Seconds without work, up to the last token of all, summed over replicas."""
        return sum(r.idle_seconds(self.last_token) for r in self.replicas)

    @property
    def drafter_seconds(self) -> float:
        """Seconds of drafter training that lay within idle time, summed over replicas."""
        return sum(r.training_seconds(self.last_token) for r in self.replicas)

    @property
    def preemption_seconds(self) -> tuple[float, ...]:
        """Seconds for which drafter training outlasted the last token; one value for each replica that trained then."""
        seconds = [r.preemption_seconds(self.last_token) for r in self.replicas]
        return tuple(s for s in seconds if s is not None)

    @property
    def stats(self) -> EngineStats:
        total = EngineStats()
        for replica in self.replicas:
            total.add(replica.stats)
        return total


class RolloutPhase:
    """Generates and scores the responses to problems, together with the other ranks. One per run and rank.

    decode: response tokens → text.  migrates: whether replicas that run dry take over running responses of others.
    """

    def __init__(
        self,
        world: World,
        engine: RolloutEngine,
        coordinator: Coordinator,
        scorers: Scorers,
        decode: Callable[[Sequence[int]], str],
        timeline: Timeline,
        should_stop: Callable[[], bool],
        migrates: bool = True,
    ) -> None:
        self.world, self.engine, self.coordinator = world, engine, coordinator
        self.scorers, self.decode, self.timeline = scorers, decode, timeline
        self.should_stop, self.migrates = should_stop, migrates

    def run(
        self,
        problems: Sequence[Problem],
        num_samples: int,
        params: SamplingParams,
        purpose: Purpose,
        step: int,
        drafter: DrafterSide = NO_DRAFTER,
    ) -> PhaseResult:
        """Generates and scores `num_samples` responses to each problem. Every rank calls this with the same arguments and gets
        the same result. Raises StopRequested on all ranks when any of them was asked to stop.

        drafter: who trains, refreshes and measures the drafter meanwhile; by default nobody does.
        """
        requests = [
            [Request(problem.problem_id, i, problem.prompt_ids, params, purpose, step) for i in range(num_samples)]
            for problem in problems
        ]
        return self.answer(problems, requests, f"{purpose} {step}", drafter)

    def answer(
        self, problems: Sequence[Problem], requests: Sequence[Sequence[Request]], name: str, drafter: DrafterSide = NO_DRAFTER
    ) -> PhaseResult:
        """Does the same for any requests: a group of them for each problem, one at least. name: no other phase has it."""
        first = requests[0][0]
        drafter.begin(name)
        self.coordinator.begin(name, len(problems))
        self.engine.stats = EngineStats()
        start = time.perf_counter()
        work = Work(self.coordinator, requests)
        rollouts, last_token, report = self._generate(problems, work, drafter)
        if any_rank(self.world, self.should_stop()):
            self.engine.abort()
            self.coordinator.abandon()
            self.scorers.abandon()
            drafter.abandon()
            raise StopRequested(f"in step {first.policy_step + 1}" if first.purpose == "rollout" else "in an evaluation")
        with self.timeline.span(SpanName.SCORE):
            own_rewards = self.scorers.drain(0.9 * self.world.timeout_seconds)  # before the other ranks give this one up
        end = time.perf_counter()
        self.engine.release()  # the policy update wants the memory
        gaps = (work.gap_seconds, work.gap_training)
        counts = (drafter.num_refreshes, work.num_received)
        replica = ReplicaReport(start, last_token, end, self.engine.stats, report, *gaps, *counts)
        with self.timeline.span(SpanName.WAIT):
            gathered = gather_objects(
                self.world, (rollouts, [own_rewards[r.problem_id, r.sample_index] for r in rollouts], replica)
            )
        pairs = [pair for rank in gathered for pair in zip(rank[0], rank[1], strict=True)]
        pairs.sort(key=lambda pair: (pair[0].problem_id, pair[0].sample_index))
        rollouts, rewards = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        check = drafter.check(rollouts, report.num_tokens, first.params.temperature)
        result = PhaseResult(rollouts, rewards, [rank[2] for rank in gathered], check)
        drafter.end(rollouts, result.seconds)
        if (seconds := replica.preemption_seconds(result.last_token)) is not None:
            self.timeline.record(SpanName.PREEMPT, result.last_token, result.last_token + seconds)
        return result

    def _generate(
        self, problems: Sequence[Problem], work: Work, drafter: DrafterSide
    ) -> tuple[list[Rollout], float, DrafterReport]:
        """Runs the part of a phase in which a replica waits for nobody. Returns (responses ended here, time of the last token,
        report of the drafter training)."""
        data_of = {problem.problem_id: problem.data for problem in problems}
        rollouts: list[Rollout] = []
        report = DrafterReport()
        last_token = time.perf_counter()
        queue_is_empty = False
        while not self.should_stop():
            if not queue_is_empty and (room := self._room(work.unit_size)):
                taken = work.take(room)
                queue_is_empty = not taken
                if taken and self.engine.is_idle:
                    work.gap_seconds += time.perf_counter() - last_token
                    work.gap_training = report.seconds
                self.engine.add(taken)
            if not self.engine.is_idle:
                finished = self.engine.step(captures=drafter.captures)
                last_token = time.perf_counter()
                for one in finished:
                    rollout = one.rollout
                    rollouts.append(rollout)
                    drafter.observe(one)
                    key = (rollout.problem_id, rollout.sample_index)
                    self.scorers.submit(key, data_of[rollout.problem_id], self.decode(rollout.token_ids))
                    work.finish(key)
                self.coordinator.heartbeat()
                if self.migrates and (num_offers := self.coordinator.num_offers()):
                    queue_is_empty = True  # or nobody would offer; and what is handed over is not to be taken back
                    work.share(self.engine, num_offers)
                drafter.refresh()
            elif self.coordinator.all_done():
                break
            elif self.coordinator.has_work():
                queue_is_empty = False
            elif (session := drafter.train(self._has_better_to_do)).num_micro_steps:
                report = report.plus(session)
            elif not self._has_better_to_do():
                with self.timeline.span(SpanName.WAIT):
                    time.sleep(POLL_SECONDS)
        return rollouts, last_token, report

    def _room(self, num_samples: int) -> int:
        """Returns the units that could start now; at least one when nothing runs, however many samples a unit has."""
        return max(self.engine.room // num_samples, int(self.engine.is_idle))

    def _has_better_to_do(self) -> bool:
        """Tells an idle replica whether to stop waiting; as long as not, it offers its help to the others."""
        if self.should_stop() or self.coordinator.all_done() or self.coordinator.has_work():
            return True
        if self.migrates:
            self.coordinator.offer_help()
        return False
