"""The rollout phase: pull work, generate, score, train the drafter when idle, average the drafters.

    every replica:   take units ─▶ generate ─▶ hand responses to the scorers ─▶ … ─▶ queue empty, none running
                        ▲                                                             ▼
                     units handed over by others  ◀─────────────────────────────  offer help
                                                                                      ▼
                     all done?  ◀─ poll between (micro-)steps ─  idle time: generate ahead, train the drafter
                        ▼
    together:        gather responses and rewards in canonical order ─▶ average the drafters, and measure
                        │
                     another round, of other problems, if dynamic sampling asks for it (dynamic.py)

The collectives come after the last response; until then a replica waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt.base.records import IdleUse, TimedStep
from tlt.base.spans import SpanName
from tlt.base.types import Finished, Problem, Purpose, Request, SamplingParams, id_of, in_order
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.training.idle.slowdown import SlowdownSums, add_up, sums_of
from tlt.training.idle.work import IdleTime, IdleWork
from tlt.training.ranks.world import World, any_rank, gather_objects
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.dynamic import DynamicSampling, Group, GroupRequest, flatten
from tlt.training.rollout.protocol import Sinks
from tlt.training.rollout.result import PhaseResult, ReplicaReport, gathered_groups, join_rounds
from tlt.training.rollout.watch import Show, progress_of, watching
from tlt.training.rollout.work import FinishedResponses, ReplicaWork
from tlt.training.rollout.work_queue import WorkQueue

NO_WORK = IdleWork()


class StopRequested(Exception):
    """The journal keeps the tokens so far; without a journal the law redraws the same tokens."""


@dataclass(frozen=True)
class Round:
    """The same on all ranks. replicas: by rank."""

    groups: list[Group]
    replicas: list[ReplicaReport]
    recalled_tokens: int
    slowdown: SlowdownSums


class RolloutPhase:
    """show: None on all ranks but the leader."""

    def __init__(
        self,
        world: World,
        engine: RolloutBackend,
        queue: WorkQueue,
        sinks: Sinks,
        timeline: Timeline,
        should_stop: Callable[[], bool],
        show: Show | None = None,
    ) -> None:
        self.world, self.engine, self.queue = world, engine, queue
        self.sinks, self.timeline = sinks, timeline
        self.should_stop, self.show = should_stop, show
        engine.parks = sinks.between_turns.lets_go_on

    def run(
        self,
        problems: Sequence[Problem],
        num_samples: int,
        params: SamplingParams,
        purpose: Purpose,
        step: int,
        idle_work: IdleWork = NO_WORK,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> PhaseResult:
        """Every rank passes the same arguments and gets the same result. Raises StopRequested on all ranks
        when one was asked to stop.

        dynamic_sampling: None: all groups stay.
        """
        self._begin(idle_work)
        rounds: list[Round] = []
        groups: list[Group] = []
        asked = [GroupRequest(problem) for problem in problems]
        while asked:
            requests = [group.requests(num_samples, params, purpose, step) for group in asked]
            name = f"{purpose} {step}, round {len(rounds)}" if rounds else f"{purpose} {step}"
            rounds.append(self._round(asked, requests, name, idle_work))
            groups += rounds[-1].groups
            asked = [] if dynamic_sampling is None else dynamic_sampling.next_requests(groups, len(rounds))
        kept = groups if dynamic_sampling is None else dynamic_sampling.select(groups)
        result = self._end(rounds, groups, kept, params.temperature, idle_work)
        idle_work.ahead.end()
        return result

    def answer(
        self,
        problems: Sequence[Problem],
        requests: Sequence[Sequence[Request]],
        name: str,
        idle_work: IdleWork = NO_WORK,
    ) -> PhaseResult:
        """One round of given requests: for each problem at least one, with consecutive sample indices.

        name: unique among the run's phases.
        """
        self._begin(idle_work)
        asked = [
            GroupRequest(problem, group[0].sample_index)
            for problem, group in zip(problems, requests, strict=True)
        ]
        only = self._round(asked, requests, name, idle_work)
        return self._end([only], only.groups, only.groups, requests[0][0].params.temperature, idle_work)

    def _begin(self, idle_work: IdleWork) -> None:
        idle_work.training.begin()
        self.engine.stats = EngineStats()

    def _end(
        self,
        rounds: Sequence[Round],
        groups: list[Group],
        kept: list[Group],
        temperature: float,
        idle_work: IdleWork,
    ) -> PhaseResult:
        self.engine.release()  # the policy update wants the memory
        rollouts, rewards = in_order(*flatten(groups))
        replicas = join_rounds([one.replicas for one in rounds])
        replica, training = replicas[self.world.rank], idle_work.training
        result = PhaseResult(
            rollouts,
            rewards,
            replicas,
            check=training.publish_and_measure(rollouts, replica.drafter.num_tokens, temperature),
            groups=groups,
            kept=kept,
            num_rounds=len(rounds),
            recalled_tokens=sum(one.recalled_tokens for one in rounds),
            slowdown=add_up(one.slowdown for one in rounds),
        )
        training.end(rollouts, result.seconds)
        if (seconds := replica.preemption_seconds(result.last_token)) is not None:
            last_token = result.last_token - self.timeline.epoch.to_rank_0
            self.timeline.record(SpanName.PREEMPT, last_token, last_token + seconds)
        return result

    # ── a round ─────────────────────────────────────────────────────────────────────────────────────────────

    def _round(
        self,
        asked: Sequence[GroupRequest],
        requests: Sequence[Sequence[Request]],
        name: str,
        idle_work: IdleWork,
    ) -> Round:
        recalled = self.sinks.journal.begin(f"{name}, policy {self.engine.policy_version}", requests)
        self.queue.begin(name, len(recalled.requests))
        idle_work.ahead.begin(self.queue.store)
        start = self.timeline.clock()
        problems = [group.problem for group in asked]
        work = ReplicaWork(self.queue, recalled.requests)
        ended = FinishedResponses(problems, requests, self.sinks, idle_work.training)
        ended.recall(recalled, self.world.rank, self.world.world_size)
        self.sinks.between_turns.begin(problems, recalled.requests, self.sinks.journal)
        idle_time = self.build_idle_time(idle_work)
        parts = self.engine, self.engine.stats, work, ended, idle_time
        self.queue.heartbeats.tells = lambda: progress_of(*parts).encode()  # for the leader's screen
        with watching(self.queue.heartbeats, sum(map(len, requests)), self.show):
            last_token, steps = self.generate(work, ended, idle_time)
        if any_rank(self.world, self.should_stop()):
            self._break_off(idle_work)
            first = requests[0][0]
            is_step = first.purpose == "rollout"
            raise StopRequested(f"in step {first.policy_step + 1}" if is_step else "in an evaluation")
        self._finish_scores(ended)
        report = self._report(start, last_token, work, idle_time)
        with self.timeline.span(SpanName.WAIT):
            own = ended.rollouts, ended.rewards, report, idle_work.ahead.take_found()
            rollouts, rewards, replicas, found = zip(*gather_objects(self.world, own), strict=True)
        idle_work.ahead.keep(found)
        groups = gathered_groups(asked, requests, rollouts, rewards, name)
        return Round(groups, [*replicas], recalled.num_tokens, self._measure_slowdown(steps, replicas))

    def _break_off(self, idle_work: IdleWork) -> None:
        self.sinks.journal.note_running(self.engine.running, at_once=True)
        self.engine.abort()
        self.queue.abandon()
        self.sinks.scorers.abandon()
        self.sinks.between_turns.abandon()
        idle_work.training.abandon()

    def _finish_scores(self, ended: FinishedResponses) -> None:
        if self.sinks.scorers.by_group:
            with self.timeline.span(SpanName.WAIT):
                divided = gather_objects(self.world, ended.divided)
            ended.settle(divided, self.world.rank)
        with self.timeline.span(SpanName.SCORE):
            ended.drain(0.9 * self.world.timeout_seconds)  # before the others time out

    def _report(
        self, start: float, last_token: float, work: ReplicaWork, idle_time: IdleTime
    ) -> ReplicaReport:
        return ReplicaReport(
            start,
            last_token,
            self.timeline.clock(),
            stats=self.engine.stats,
            drafter=idle_time.drafter_report,
            gap_seconds=work.gap_seconds,
            gap_training=work.gap_training,
            num_migrated=work.num_received,
            ahead=idle_time.ahead_report,
            idle=tuple(idle_time.stretches),
            machine=self.timeline.epoch.machine,
        ).shifted(self.timeline.epoch.to_rank_0)

    def _measure_slowdown(
        self, steps: Sequence[TimedStep], replicas: Sequence[ReplicaReport]
    ) -> SlowdownSums:
        if all(stretch.use is IdleUse.REST for replica in replicas for stretch in replica.idle):
            return SlowdownSums.zero()
        epoch, rank = self.timeline.epoch, self.world.rank
        beside = [
            r.idle for number, r in enumerate(replicas) if number != rank and r.machine == epoch.machine
        ]
        own = sums_of([step.shifted(epoch.to_rank_0) for step in steps], beside)
        return add_up(gather_objects(self.world, own))

    def generate(
        self, work: ReplicaWork, ended: FinishedResponses, idle_time: IdleTime
    ) -> tuple[float, list[TimedStep]]:
        """No collective. Returns (time of the last token, engine steps)."""
        last_token = self.timeline.clock()
        steps: list[TimedStep] = []
        looks_for_units = True
        between_turns = self.sinks.between_turns
        while not self.should_stop():
            continued, whole = between_turns.collect()
            self.engine.add(continued)
            self._keep(whole, work, ended)
            if looks_for_units and (room := self._room(work.unit_size)):
                taken = work.take(room)
                looks_for_units = bool(taken)
                if taken and self.engine.is_idle:
                    work.gap_seconds += self.timeline.clock() - last_token
                    work.gap_training = idle_time.drafter_report.seconds
                self.engine.add(taken)
            if not self.engine.is_idle:
                finished = self.engine.step(captures=ended.training.captures)
                last_token = self.timeline.clock()
                if (latest := self.engine.stats.latest) is not None and latest not in steps[-1:]:
                    steps.append(latest)
                self._keep([one for one in finished if not between_turns.take(one)], work, ended)
                ended.collect()
                self.sinks.journal.note_running(self.engine.running)
                self.queue.heartbeat()
                if num_offers := self.queue.num_offers():
                    # Offers mean an empty queue. Do not look there: `share` adds a unit for the helper.
                    looks_for_units = False
                    work.share(self.engine, num_offers)
            elif self._has_better_to_do():
                idle_time.leave()
                if self.queue.all_done():
                    break
                looks_for_units = True
            else:
                idle_time.spend()
        idle_time.leave()
        return last_token, steps

    def _keep(self, whole: Sequence[Finished], work: ReplicaWork, ended: FinishedResponses) -> None:
        for one in whole:
            self.engine.forget(id_of(one.rollout))
            ended.add(one)
            work.finish(id_of(one.rollout))

    def build_idle_time(self, idle_work: IdleWork) -> IdleTime:
        return IdleTime(idle_work, self._has_better_to_do, self.queue.rest, self.timeline)

    def _room(self, num_samples: int) -> int:
        return max(self.engine.room // num_samples, int(self.engine.is_idle))

    def _has_better_to_do(self) -> bool:
        between_turns = self.sinks.between_turns
        if between_turns.is_waiting:
            self.queue.heartbeat()  # a tool may take longer than run.timeout_seconds
        if self.should_stop() or between_turns.has_news:
            return True
        return self.queue.has_news(offers_help=not between_turns.is_waiting)
