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

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from safetensors.torch import load, save

from tlt.distributed.mailbox import Mailbox
from tlt.distributed.work_queue import Coordinator
from tlt.distributed.world import World, any_rank, gather_objects
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.model import DraftModel
from tlt.drafter.service import DrafterWatch
from tlt.drafter.spot import SpotTrainer
from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.report.timeline import Timeline
from tlt.rl.rewards import RewardPool
from tlt.types import (
    DrafterCheck,
    DrafterReport,
    Problem,
    Purpose,
    Request,
    Reward,
    Rollout,
    SamplingParams,
    SpanName,
)

POLL_SECONDS = 0.002


class StopRequested(Exception):
    """The user asked the run to stop. What was generated in this phase is dropped; the law gives it again."""


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica did in a phase; times on the host's monotonic clock.

    gap_seconds: without work before the last token, until it got some again.  gap_training: of these, seconds in
    which it trained the drafter.
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
        """Of the idle seconds."""
        at_the_end = min(self.drafter.seconds - self.gap_training, max(last_token_of_all - self.last_token, 0.0))
        return self.gap_training + at_the_end

    def preemption_seconds(self, last_token_of_all: float) -> float | None:
        """From the last token of all to the return of the drafter's trainer; None: it was not at work then."""
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
        """Without work, up to the last token of all, summed over replicas."""
        return sum(r.idle_seconds(self.last_token) for r in self.replicas)

    @property
    def drafter_seconds(self) -> float:
        """Seconds of drafter training that lay within idle time, summed over replicas."""
        return sum(r.training_seconds(self.last_token) for r in self.replicas)

    @property
    def preemption_seconds(self) -> tuple[float, ...]:
        """Of every replica that trained when the last response ended."""
        seconds = [r.preemption_seconds(self.last_token) for r in self.replicas]
        return tuple(s for s in seconds if s is not None)

    @property
    def stats(self) -> EngineStats:
        total = EngineStats()
        for replica in self.replicas:
            total.add(replica.stats)
        return total


class DrafterRefresh:
    """Takes drafters from replicas that train to engines that still generate, within one rollout: at most one in `seconds`, on
    either side. What a rollout publishes is of no use to the next one, which starts with the average.

    mailbox: the run's own.
    """

    def __init__(self, mailbox: Mailbox, learned: LearnedDrafter, seconds: float) -> None:
        self.mailbox, self.learned, self.seconds = mailbox, learned, seconds

    def begin(self, rollout: str) -> None:
        """A rollout starts, under a name of its own in this run. A version is none: after an undone update it comes again."""
        self._header = f"{rollout}\n".encode()
        self._next = time.perf_counter() + self.seconds
        self.num_refreshes = 0

    def publish(self, model: DraftModel) -> None:
        """Sends the drafter, unless it holds a number that is not finite: that the end of the step deals with."""
        if self._is_due():
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            if all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                self.mailbox.send(self._header + save(tensors))

    def refresh(self) -> None:
        """Between engine steps: what the engine drafts with becomes the latest that another replica has published."""
        if self._is_due() and (message := self.mailbox.receive()) is not None and message.startswith(self._header):
            self.learned.load(load(message[len(self._header) :]), self.learned.version + 1)
            self.num_refreshes += 1

    def _is_due(self) -> bool:
        now = time.perf_counter()
        is_due = now >= self._next
        if is_due:
            self._next = now + self.seconds
        return is_due


class _Work:
    """What a replica holds of a phase's units: groups of requests, and responses in the making that others have handed over."""

    def __init__(self, coordinator: Coordinator, requests: Sequence[Sequence[Request]]) -> None:
        self.coordinator, self.requests = coordinator, requests
        self.group_of = {group[0].problem_id: group for group in requests}
        self.unit_of: dict[tuple[str, int], int] = {}
        self.num_open: Counter[int] = Counter()
        self.num_received = 0
        self.gap_seconds = self.gap_training = 0.0

    @property
    def unit_size(self) -> int:
        return len(self.requests[0])

    def take(self, room: int) -> list[Request]:
        """Up to `room` units' work; nothing: there is none now."""
        taken: list[Request] = []
        for unit in self.coordinator.take(room):
            if unit < len(self.requests):
                taken += self._hold(unit, self.requests[unit])
            else:
                received = [self._unpack(part) for part in self.coordinator.receive(unit)]
                taken += self._hold(unit, received)
                self.num_received += len(received)
        return taken

    def finish(self, key: tuple[str, int]) -> None:
        """This response is no longer the replica's: it has ended, or somebody else goes on with it."""
        unit = self.unit_of.pop(key)
        self.num_open[unit] -= 1
        if self.num_open[unit] == 0:
            self.coordinator.finish(unit)

    def share(self, engine: RolloutEngine, num_offers: int) -> None:
        """Hands one of those who offer help its part of what runs or waits here, if that is worth it."""
        num_waiting = min(engine.num_waiting, (engine.num_waiting + len(engine.running)) // (1 + num_offers))
        slots = worth_migrating([(sequence.num_cached, sequence.num_left) for sequence in engine.running], num_offers)
        if not (num_waiting or slots) or (unit := self.coordinator.accept_help()) is None:
            return
        requests = engine.withdraw_waiting(num_waiting) if num_waiting else engine.withdraw(slots)
        self.coordinator.hand_over(unit, [self._pack(request) for request in requests])
        for request in requests:
            self.finish((request.problem_id, request.sample_index))

    def _hold(self, unit: int, requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            self.unit_of[request.problem_id, request.sample_index] = unit
        self.num_open[unit] = len(requests)
        return requests

    def _pack(self, request: Request) -> bytes:
        """All replicas know the phase's requests; JSON gives back every float as it was."""
        return json.dumps([request.problem_id, request.sample_index, request.token_ids, request.logprobs]).encode()

    def _unpack(self, part: bytes) -> Request:
        problem_id, sample_index, token_ids, logprobs = json.loads(part)
        request: Request = self.group_of[problem_id][sample_index]
        return replace(request, token_ids=tuple(token_ids), logprobs=tuple(logprobs))


def worth_migrating(responses: Sequence[tuple[int, int]], num_offers: int) -> list[int]:
    """Which of a replica's running responses go to the next of `num_offers` that have run dry: an equal part, long and short
    ones alike, but none for which more tokens would be read again there than may still come.

    responses: by slot, the tokens in the cache and the tokens that may still come.
    """
    if len(responses) < 2:
        return []
    worth = sorted((num_cached, slot) for slot, (num_cached, num_left) in enumerate(responses) if num_cached <= num_left)
    num = min(max(len(responses) // (1 + num_offers), 1), len(worth))
    return [worth[i * len(worth) // num][1] for i in range(num)]


class RolloutPhase:
    """One per run and rank. `learned` is the engine's learned drafter, if it has one, `watch` who looks after it, and `spot`
    who trains it, if anybody does; `refresh` lets others use it before the rollout ends; `decode` turns response tokens into
    text. `migrates`: whether replicas that run dry take over running responses of others."""

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
        watch: DrafterWatch | None = None,
        refresh: DrafterRefresh | None = None,
        migrates: bool = True,
    ) -> None:
        self.world, self.engine, self.coordinator = world, engine, coordinator
        self.scorers, self.decode, self.timeline = scorers, decode, timeline
        self.should_stop, self.learned, self.spot, self.watch = should_stop, learned, spot, watch
        self.refresh, self.migrates = refresh, migrates
        assert (learned is None) == (watch is None), "a learned drafter is watched"

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
        watch = self.watch if train_drafter else None
        spot = self.spot if watch is not None and watch.trains else None
        refresh = self.refresh if train_drafter else None
        if refresh is not None:
            refresh.begin(f"{purpose} {step}")
        self.coordinator.begin(f"{purpose} {step}", len(problems))
        self.engine.stats = EngineStats()
        start = time.perf_counter()
        work = _Work(self.coordinator, requests)
        rollouts, last_token, report = self._generate(problems, work, spot, refresh)
        if any_rank(self.world, self.should_stop()):
            self.engine.abort()
            self.coordinator.abandon()
            self.scorers.abandon()
            if watch is not None:
                watch.abandon()
            if self.spot is not None and train_drafter:
                self.spot.abandon()
            raise StopRequested(f"during {purpose} {step}")
        with self.timeline.span(SpanName.SCORE):
            own_rewards = self.scorers.drain(0.9 * self.world.timeout_seconds)  # before the other ranks give this one up
        num_refreshes = refresh.num_refreshes if refresh is not None else 0
        end = time.perf_counter()
        gaps = (work.gap_seconds, work.gap_training)
        replica = ReplicaReport(start, last_token, end, self.engine.stats, report, *gaps, num_refreshes, work.num_received)
        with self.timeline.span(SpanName.WAIT):
            gathered = gather_objects(
                self.world, (rollouts, [own_rewards[r.problem_id, r.sample_index] for r in rollouts], replica)
            )
        pairs = [pair for rank in gathered for pair in zip(rank[0], rank[1], strict=True)]
        pairs.sort(key=lambda pair: (pair[0].problem_id, pair[0].sample_index))
        rollouts, rewards = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        check = None
        if watch is not None:
            with self.timeline.span(SpanName.CHECK_DRAFTER):
                check = watch.end_step(rollouts, report.num_tokens, params.temperature)
        result = PhaseResult(rollouts, rewards, [rank[2] for rank in gathered], check)
        if self.spot is not None and train_drafter:
            self.spot.end_step(rollouts, result.seconds)
        if (seconds := replica.preemption_seconds(result.last_token)) is not None:
            self.timeline.record(SpanName.PREEMPT, result.last_token, result.last_token + seconds)
        return result

    def _generate(
        self,
        problems: Sequence[Problem],
        work: _Work,
        spot: SpotTrainer | None,
        refresh: DrafterRefresh | None,
    ) -> tuple[list[Rollout], float, DrafterReport]:
        data_of = {problem.problem_id: problem.data for problem in problems}
        rollouts: list[Rollout] = []
        report = DrafterReport()
        last_token = time.perf_counter()
        queue_is_empty = False
        publish = refresh.publish if refresh is not None else None
        while not self.should_stop():
            if not queue_is_empty and (room := self._room(work.unit_size)):
                taken = work.take(room)
                queue_is_empty = not taken
                if taken and self.engine.is_idle:
                    work.gap_seconds += time.perf_counter() - last_token
                    work.gap_training = report.seconds
                self.engine.add(taken)
            if not self.engine.is_idle:
                finished = self.engine.step(captures=spot is not None and spot.keeps_captured)
                last_token = time.perf_counter()
                for rollout, captured_TF in ((one.rollout, one.captured_TF) for one in finished):
                    rollouts.append(rollout)
                    if spot is not None:
                        spot.add(rollout, captured_TF)
                    key = (rollout.problem_id, rollout.sample_index)
                    self.scorers.submit(key, data_of[rollout.problem_id], self.decode(rollout.token_ids))
                    work.finish(key)
                self.coordinator.heartbeat()
                if self.migrates and (num_offers := self.coordinator.num_offers()):
                    queue_is_empty = True  # or nobody would offer; and what is handed over is not to be taken back
                    work.share(self.engine, num_offers)
                if refresh is not None:
                    refresh.refresh()
            elif self.coordinator.all_done():
                break
            elif self.coordinator.has_work():
                queue_is_empty = False
            elif spot is not None and (session := self._train_drafter(spot, publish)).num_micro_steps:
                report = report.plus(session)
            elif not self._has_better_to_do():
                with self.timeline.span(SpanName.WAIT):
                    time.sleep(POLL_SECONDS)
        return rollouts, last_token, report

    def _room(self, num_samples: int) -> int:
        """Units that could start now; at least one when nothing runs, however many samples a unit has."""
        return max(self.engine.room // num_samples, int(self.engine.is_idle))

    def _has_better_to_do(self) -> bool:
        """Asked by a replica that has run dry, again and again."""
        if self.should_stop() or self.coordinator.all_done() or self.coordinator.has_work():
            return True
        if self.migrates:
            self.coordinator.offer_help()
        return False

    def _train_drafter(self, spot: SpotTrainer, publish: Callable[[DraftModel], None] | None) -> DrafterReport:
        assert self.watch is not None, "a drafter is trained under watch"
        return self.watch.run(lambda: spot.run(self._has_better_to_do, publish))
