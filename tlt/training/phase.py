"""The rollout phase: pull, generate, score, train the drafter when idle, average the drafters. Knows no policy update.

    every replica:   take units ─▶ generate ─▶ hand responses to the scorers ─▶ … ─▶ queue empty, nothing running
                        ▲                                                               ▼
                     units handed over by others  ◀──────────────────────────────  offer help
                                                                                        ▼
                     all done?  ◀─ poll between micro-steps ─  train the drafter on what is there
                        ▼
    together:        gather responses and rewards in canonical order ─▶ average the drafters by tokens trained, and measure
                        │
                     another round, of other problems, where dynamic sampling asks for it (dynamic.py)

The collectives come after the last response; until then a replica waits for nobody. A drafter in training may reach those
that still generate through a mailbox (`DrafterRefresh`); tokens do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tlt.distributed.work_queue import Coordinator
from tlt.distributed.world import World, any_rank, gather_objects
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.report.timeline import Timeline
from tlt.rl.batch import check_complete, in_order, key_of
from tlt.rl.rewards import Key
from tlt.spans import SpanName
from tlt.training.drafter_side import DrafterSide
from tlt.training.dynamic import Draw, DynamicSampling, Group, flatten
from tlt.training.work import Work
from tlt.types import DrafterCheck, DrafterReport, Problem, Purpose, Request, Reward, Rollout, SamplingParams

NO_DRAFTER = DrafterSide()


class Scorers(Protocol):
    """Scores responses while others are generated; `RewardPool` does so in processes."""

    def submit(self, key: Key, problem: Mapping[str, Any], text: str, token_ids: Sequence[int], step: int) -> None:
        """Takes a response in, without waiting. step: updates behind the policy that wrote it."""

    def drain(self, patience: float) -> dict[Key, Reward]:
        """Returns the rewards of all that was submitted since the last time."""
        ...

    def abandon(self) -> None:
        """Forgets all that was submitted."""


class StopRequested(Exception):
    """The user asked the run to stop. What the phase generated is dropped: the law gives it again, token for token."""


@dataclass(frozen=True)
class ReplicaReport:
    """Says what one replica did in a phase; times are on rank 0's monotonic clock.

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

    def shifted(self, seconds: float) -> ReplicaReport:
        """Returns the same on another clock, which is so much ahead."""
        times = {name: getattr(self, name) + seconds for name in ("start", "last_token", "end")}
        preempted_at = self.drafter.preempted_at
        drafter = replace(self.drafter, preempted_at=None if preempted_at is None else preempted_at + seconds)
        return replace(self, drafter=drafter, **times)

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

    def then(self, later: ReplicaReport, last_token_of_all: float) -> ReplicaReport:
        """Returns this round and the next as one; what was idle at this one's end, `last_token_of_all`, is now a gap. `stats`
        and `num_refreshes` count on through a phase."""
        return replace(
            later,
            start=self.start,
            drafter=self.drafter.plus(later.drafter),
            gap_seconds=self.idle_seconds(last_token_of_all) + later.gap_seconds,
            gap_training=self.training_seconds(last_token_of_all) + later.gap_training,
            num_migrated=self.num_migrated + later.num_migrated,
        )


@dataclass(frozen=True)
class PhaseResult:
    """All replicas' responses with their rewards, ordered by (problem id, sample index), and where the time went.

    check: of the learned drafter; None where there is none or it was not asked for.
    groups: the same responses by problem, in the order drawn.  kept: those of them that the update takes.
    num_rounds: rounds in which they were sampled.
    """

    rollouts: list[Rollout]
    rewards: list[Reward]
    replicas: list[ReplicaReport] = field(repr=False)
    check: DrafterCheck | None = None
    groups: Sequence[Group] = field(default=(), repr=False)
    kept: Sequence[Group] = field(default=(), repr=False)
    num_rounds: int = 1

    @property
    def for_update(self) -> tuple[list[Rollout], list[Reward]]:
        """Responses and rewards that the update takes."""
        return flatten(self.kept)

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
        engine: RolloutBackend,
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
        sampling: DynamicSampling | None = None,
    ) -> PhaseResult:
        """Generates and scores `num_samples` responses to each problem. Every rank calls this with the same arguments and gets
        the same result. Raises StopRequested on all ranks when any of them was asked to stop.

        drafter: who trains, refreshes and measures the drafter meanwhile; by default nobody does.
        sampling: who asks for further rounds; None: nobody does.
        """
        name = f"{purpose} {step}"
        drafter.begin(name)
        self.engine.stats = EngineStats()
        groups: list[Group] = []
        rounds: list[list[ReplicaReport]] = []
        draws = [Draw(problem) for problem in problems]
        while draws:
            requests = [
                [
                    Request(draw.problem.problem_id, draw.first_sample + i, draw.problem.prompt_ids, params, purpose, step)
                    for i in range(num_samples)
                ]
                for draw in draws
            ]
            found, reports = self._round(draws, requests, f"{name}, round {len(rounds)}" if rounds else name, drafter)
            groups += found
            rounds.append(reports)
            draws = [] if sampling is None else sampling.next_draws(groups, len(rounds))
        return self._end(groups, rounds, params.temperature, drafter, sampling)

    def answer(
        self, problems: Sequence[Problem], requests: Sequence[Sequence[Request]], name: str, drafter: DrafterSide = NO_DRAFTER
    ) -> PhaseResult:
        """Does the same for any requests, in one round: a group of them for each problem, one at least, whose sample indices
        follow each other. name: no other phase of the run has it."""
        drafter.begin(name)
        self.engine.stats = EngineStats()
        draws = [Draw(problem, group[0].sample_index) for problem, group in zip(problems, requests, strict=True)]
        groups, replicas = self._round(draws, requests, name, drafter)
        return self._end(groups, [replicas], requests[0][0].params.temperature, drafter)

    def _end(
        self,
        groups: list[Group],
        rounds: list[list[ReplicaReport]],
        temperature: float,
        drafter: DrafterSide,
        sampling: DynamicSampling | None = None,
    ) -> PhaseResult:
        """Ends a phase, with what its rounds have brought."""
        self.engine.release()  # the policy update wants the memory
        rollouts, rewards = in_order(*flatten(groups))
        replicas = combine(rounds)
        replica = replicas[self.world.rank]
        check = drafter.check(rollouts, replica.drafter.num_tokens, temperature)
        kept = groups if sampling is None else sampling.select(groups)
        result = PhaseResult(rollouts, rewards, replicas, check, groups, kept, len(rounds))
        drafter.end(rollouts, result.seconds)
        if (seconds := replica.preemption_seconds(result.last_token)) is not None:
            last_token = result.last_token - self.timeline.epoch.to_rank_0
            self.timeline.record(SpanName.PREEMPT, last_token, last_token + seconds)
        return result

    def _round(
        self, draws: Sequence[Draw], requests: Sequence[Sequence[Request]], name: str, drafter: DrafterSide
    ) -> tuple[list[Group], list[ReplicaReport]]:
        """Generates and scores the responses to `requests`, those of one draw each. Returns (a group for every draw, what the
        replicas did), the same on all ranks."""
        self.coordinator.begin(name, len(draws))
        start = time.perf_counter()
        work = Work(self.coordinator, requests)
        rollouts, last_token, report = self._generate([draw.problem for draw in draws], work, drafter)
        if any_rank(self.world, self.should_stop()):
            self.engine.abort()
            self.coordinator.abandon()
            self.scorers.abandon()
            drafter.abandon()
            first = requests[0][0]
            raise StopRequested(f"in step {first.policy_step + 1}" if first.purpose == "rollout" else "in an evaluation")
        with self.timeline.span(SpanName.SCORE):
            rewards = self.scorers.drain(0.9 * self.world.timeout_seconds)  # before the other ranks give this one up
        end = time.perf_counter()
        gaps = (work.gap_seconds, work.gap_training)
        counts = (drafter.num_refreshes, work.num_received)
        replica = ReplicaReport(start, last_token, end, self.engine.stats, report, *gaps, *counts)
        replica = replica.shifted(self.timeline.epoch.to_rank_0)
        with self.timeline.span(SpanName.WAIT):
            gathered = gather_objects(self.world, (rollouts, rewards, replica))
        asked = [(request.problem_id, request.sample_index) for group in requests for request in group]
        check_complete(asked, [([*map(key_of, found)], [*scored]) for found, scored, _ in gathered], name)
        by_key = {key_of(rollout): rollout for found, _, _ in gathered for rollout in found}
        reward_of = {key: reward for _, rewards, _ in gathered for key, reward in rewards.items()}
        groups = []
        for draw, group in zip(draws, requests, strict=True):
            keys = [(request.problem_id, request.sample_index) for request in group]
            groups.append(Group(draw, tuple(by_key[key] for key in keys), tuple(reward_of[key] for key in keys)))
        return groups, [report for _, _, report in gathered]

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
                    data, text = data_of[rollout.problem_id], self.decode(rollout.token_ids)
                    self.scorers.submit(key, data, text, rollout.token_ids, rollout.policy_version)
                    work.finish(key)
                self.coordinator.heartbeat()
                if self.migrates and (num_offers := self.coordinator.num_offers()):
                    queue_is_empty = True  # or nobody would offer; and what is handed over is not to be taken back
                    work.share(self.engine, num_offers)
                drafter.refresh()
            elif self._has_better_to_do():
                if self.coordinator.all_done():
                    break
                queue_is_empty = False
            elif (session := drafter.train(self._has_better_to_do)).num_micro_steps:
                report = report.plus(session)
            else:
                with self.timeline.span(SpanName.WAIT):
                    time.sleep(self.coordinator.pause)
        return rollouts, last_token, report

    def _room(self, num_samples: int) -> int:
        """Returns the units that could start now; at least one when nothing runs, however many samples a unit has."""
        return max(self.engine.room // num_samples, int(self.engine.is_idle))

    def _has_better_to_do(self) -> bool:
        """Tells an idle replica whether to stop waiting; as long as not, it offers its help to the others."""
        return self.should_stop() or self.coordinator.has_news(offers_help=self.migrates)


def combine(rounds: Sequence[Sequence[ReplicaReport]]) -> list[ReplicaReport]:
    """Returns what each replica did in all rounds of a phase."""
    replicas = list(rounds[0])
    for later in rounds[1:]:
        last_token = max(replica.last_token for replica in replicas)
        replicas = [replica.then(report, last_token) for replica, report in zip(replicas, later, strict=True)]
    return replicas
