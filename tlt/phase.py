"""The rollout phase: pull, generate, score, train the drafter when idle, average the drafters. Knows no policy update.

    every replica:   take units ─▶ generate ─▶ hand responses to the scorers ─▶ … ─▶ queue empty, nothing running
                                                                                        ▼
                     all done?  ◀─ poll between micro-steps ─  train the drafter on what is there
                        ▼
    together:        gather responses and rewards in canonical order ─▶ average the drafters by tokens trained

The collectives come after the last response; until then a replica waits for nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tlt.distributed.collectives import World, any_rank, average_weighted, gather_objects
from tlt.distributed.coordinator import Coordinator
from tlt.drafting.spot import SpotTrainer
from tlt.report.timeline import Timeline
from tlt.rl.rewards import RewardPool
from tlt.rollout.drafters import LearnedDrafter
from tlt.rollout.engine import EngineStats, RolloutEngine
from tlt.types import DrafterReport, Problem, Purpose, Request, Reward, Rollout, SamplingParams

POLL_SECONDS = 0.002


class StopRequested(Exception):
    """The user asked the run to stop. What was generated in this phase is dropped; the law gives it again."""


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica did in a phase; times on the host's monotonic clock."""

    start: float
    last_token: float
    end: float
    stats: EngineStats
    drafter: DrafterReport

    def idle_seconds(self, last_token_of_all: float) -> float:
        return max(last_token_of_all - self.last_token, 0.0)


@dataclass(frozen=True)
class PhaseResult:
    """All replicas' responses with their rewards, ordered by (problem id, sample index), and where the time went."""

    rollouts: list[Rollout]
    rewards: list[Reward]
    replicas: list[ReplicaReport] = field(repr=False)
    drafter_version: int = 0

    @property
    def seconds(self) -> float:
        return max(r.end for r in self.replicas) - min(r.start for r in self.replicas)

    @property
    def last_token(self) -> float:
        return max(r.last_token for r in self.replicas)

    @property
    def idle_seconds(self) -> float:
        """From each replica's last token to the last token of all, summed."""
        return sum(r.idle_seconds(self.last_token) for r in self.replicas)

    @property
    def drafter_seconds(self) -> float:
        """Seconds of drafter training that lay within idle time, summed over replicas."""
        return sum(min(r.drafter.seconds, r.idle_seconds(self.last_token)) for r in self.replicas)

    @property
    def stats(self) -> EngineStats:
        total = EngineStats()
        for replica in self.replicas:
            total.add(replica.stats)
        return total


class RolloutPhase:
    """One per run and rank. `learned` is the engine's learned drafter, if it has one, and `spot` who trains it, if anybody
    does; `decode` turns response tokens into text."""

    def __init__(
        self,
        world: World,
        engine: RolloutEngine,
        coordinator: Coordinator,
        scorers: RewardPool,
        decode: Callable[[Sequence[int]], str],
        timeline: Timeline,
        should_stop: Callable[[], bool],
        learned: LearnedDrafter | None = None,
        spot: SpotTrainer | None = None,
    ) -> None:
        self.world, self.engine, self.coordinator = world, engine, coordinator
        self.scorers, self.decode, self.timeline = scorers, decode, timeline
        self.should_stop, self.learned, self.spot = should_stop, learned, spot

    def run(
        self,
        problems: Sequence[Problem],
        num_samples: int,
        params: SamplingParams,
        purpose: Purpose,
        step: int,
        train_drafter: bool = True,
    ) -> PhaseResult:
        """Every rank calls this with the same arguments and gets the same result. Raises StopRequested on all ranks when
        any of them was asked to stop."""
        requests = [
            [Request(problem.problem_id, i, problem.prompt_ids, params, purpose, step) for i in range(num_samples)]
            for problem in problems
        ]
        spot = self.spot if train_drafter else None
        if self.learned is not None:  # only what the drafter is trained for is kept to train on
            self.learned.on_finish = None if spot is None else spot.buffer.add
        self.coordinator.begin(f"{purpose} {step}", len(problems))
        self.engine.stats = EngineStats()
        start = time.perf_counter()
        rollouts, last_token, report = self._generate(problems, requests, spot)
        if any_rank(self.world, self.should_stop()):
            self.engine.abort()
            self.coordinator.abandon()
            self.scorers.abandon()
            raise StopRequested(f"during {purpose} {step}")
        with self.timeline.span("score"):
            rewards = self.scorers.drain()
        replica = ReplicaReport(start, last_token, time.perf_counter(), self.engine.stats, report)
        with self.timeline.span("wait"):
            gathered = gather_objects(
                self.world, (rollouts, [rewards[r.problem_id, r.sample_index] for r in rollouts], replica)
            )
        pairs = [pair for rank in gathered for pair in zip(rank[0], rank[1], strict=True)]
        pairs.sort(key=lambda pair: (pair[0].problem_id, pair[0].sample_index))
        result_rollouts, result_rewards = [p[0] for p in pairs], [p[1] for p in pairs]
        if spot is not None:
            self._average_drafters(spot, report, result_rollouts)
        version = self.learned.version if self.learned is not None else 0
        return PhaseResult(result_rollouts, result_rewards, [rank[2] for rank in gathered], version)

    def _generate(
        self, problems: Sequence[Problem], requests: Sequence[Sequence[Request]], spot: SpotTrainer | None
    ) -> tuple[list[Rollout], float, DrafterReport]:
        unit_of = {problem.problem_id: unit for unit, problem in enumerate(problems)}
        data_of = {problem.problem_id: problem.data for problem in problems}
        open_samples = Counter({problem.problem_id: len(group) for problem, group in zip(problems, requests, strict=True)})
        rollouts: list[Rollout] = []
        report = DrafterReport()
        last_token = time.perf_counter()
        queue_is_empty = False
        while not self.should_stop():
            if not queue_is_empty and (room := self._room(len(requests[0]))):
                units = self.coordinator.take(room)
                queue_is_empty = not units
                self.engine.add(request for unit in units for request in requests[unit])
            if not self.engine.is_idle:
                for rollout in self.engine.step():
                    rollouts.append(rollout)
                    key = (rollout.problem_id, rollout.sample_index)
                    self.scorers.submit(key, data_of[rollout.problem_id], self.decode(rollout.token_ids))
                    open_samples[rollout.problem_id] -= 1
                    if open_samples[rollout.problem_id] == 0:
                        self.coordinator.finish(unit_of[rollout.problem_id])
                last_token = time.perf_counter()
                self.coordinator.heartbeat()
            elif self.coordinator.all_done():
                break
            elif self.coordinator.has_work():
                queue_is_empty = False
            elif spot is None or (session := spot.run(self._has_better_to_do)).num_micro_steps == 0:
                with self.timeline.span("wait"):
                    time.sleep(POLL_SECONDS)
            else:
                report = report.plus(session)
        return rollouts, last_token, report

    def _room(self, num_samples: int) -> int:
        """Units that could start now; at least one when nothing runs, however many samples a unit has."""
        return max(self.engine.room // num_samples, int(self.engine.is_idle))

    def _has_better_to_do(self) -> bool:
        return self.should_stop() or self.coordinator.all_done() or self.coordinator.has_work()

    def _average_drafters(self, spot: SpotTrainer, report: DrafterReport, rollouts: Sequence[Rollout]) -> None:
        """One drafter for all replicas, weighted by the tokens each trained on, and the longest responses for next time."""
        assert self.learned is not None, "only a learned drafter can be trained"
        with self.timeline.span("average drafters"):
            if average_weighted(self.world, spot.trainer.shared_tensors(), report.num_tokens) > 0:
                self.learned.load(spot.trainer.model.state_dict(), self.learned.version + 1)
        spot.carry_over(rollouts)
