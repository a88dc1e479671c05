"""The result of a rollout phase: the responses with their rewards, and where each replica's time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tlt.base.records import (
    NAN,
    AheadReport,
    DrafterCheck,
    DrafterReport,
    IdleRecord,
    IdleStretch,
    IdleUse,
    LengthStats,
    RolloutRecord,
)
from tlt.base.types import ResponseId, Reward, Rollout
from tlt.engine.stats import EngineStats
from tlt.training.rollout.dynamic import Group, flatten
from tlt.training.rollout.idle_choice import Worth
from tlt.training.rollout.slowdown import SlowdownSums


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica did in a phase. Times are on rank 0's monotonic clock.

    gap_seconds: seconds without work before the last token.
    gap_training: seconds of them in which it trained the drafter.
    num_migrated: responses that it took over.
    ahead: generation of later steps' responses.
    idle: its idle time by use.
    machine: the machine whose clock it reads.
    """

    start: float
    last_token: float
    end: float
    stats: EngineStats
    drafter: DrafterReport
    gap_seconds: float = 0.0
    gap_training: float = 0.0
    num_migrated: int = 0
    ahead: AheadReport = field(default_factory=AheadReport)
    idle: tuple[IdleStretch, ...] = ()
    machine: str = ""

    def shifted(self, seconds: float) -> ReplicaReport:
        """Returns the report on a clock that is `seconds` ahead."""
        preempted_at = self.drafter.preempted_at
        return replace(
            self,
            start=self.start + seconds,
            last_token=self.last_token + seconds,
            end=self.end + seconds,
            drafter=replace(
                self.drafter, preempted_at=None if preempted_at is None else preempted_at + seconds
            ),
            idle=tuple(replace(s, start=s.start + seconds, end=s.end + seconds) for s in self.idle),
        )

    def idle_seconds(self, last_token_of_all: float) -> float:
        """Returns the seconds without work up to the last token of all replicas."""
        return self.gap_seconds + max(last_token_of_all - self.last_token, 0.0)

    def training_seconds(self, last_token_of_all: float) -> float:
        """Returns the part of the idle seconds in which it trained the drafter."""
        at_the_end = max(last_token_of_all - self.last_token, 0.0)
        return self.gap_training + min(self.drafter.seconds - self.gap_training, at_the_end)

    def preemption_seconds(self, last_token_of_all: float) -> float | None:
        """Returns the seconds from the last token of all to the trainer's return; None: it did not train
        then."""
        at = self.drafter.preempted_at
        return None if at is None or at < last_token_of_all else at - last_token_of_all

    def then(self, later: ReplicaReport, last_token_of_all: float) -> ReplicaReport:
        """Returns this round and the next as one. Idle time at this round's end, `last_token_of_all`, becomes
        a gap. `stats` counts on through a phase."""
        return replace(
            later,
            start=self.start,
            drafter=self.drafter.plus(later.drafter),
            gap_seconds=self.idle_seconds(last_token_of_all) + later.gap_seconds,
            gap_training=self.training_seconds(last_token_of_all) + later.gap_training,
            num_migrated=self.num_migrated + later.num_migrated,
            ahead=self.ahead.plus(later.ahead),
            idle=self.idle + later.idle,
        )


@dataclass(frozen=True)
class PhaseResult:
    """All replicas' responses with their rewards, ordered by (problem id, sample index), and their times.

    check: measurements of the learned drafter; None: there is none, or it was not measured.
    groups: the same responses by problem, in the order drawn.
    kept: the groups that the update takes.
    num_rounds: rounds of sampling.
    recalled_tokens: response tokens that an earlier attempt generated.
    slowdown: how much idle ranks' work slowed busy ranks of the same machine.
    """

    rollouts: list[Rollout]
    rewards: list[Reward]
    replicas: list[ReplicaReport] = field(repr=False)
    check: DrafterCheck | None = None
    groups: Sequence[Group] = field(default=(), repr=False)
    kept: Sequence[Group] = field(default=(), repr=False)
    num_rounds: int = 1
    recalled_tokens: int = 0
    slowdown: SlowdownSums = field(default_factory=SlowdownSums.zero, repr=False)

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
    def idle_seconds_by_use(self) -> dict[str, float]:
        """Seconds without work until the phase's end, summed over replicas, by what they were spent on."""
        idle = [stretch for replica in self.replicas for stretch in replica.idle]
        return {
            use.value: sum(s.end - s.start for s in idle if s.use is use)
            for use in sorted({s.use for s in idle})
        }

    @property
    def drafter_seconds(self) -> float:
        """Seconds of drafter training that lay within idle time, summed over replicas."""
        return sum(r.training_seconds(self.last_token) for r in self.replicas)

    @property
    def preemption_seconds(self) -> tuple[float, ...]:
        """Seconds for which drafter training outlasted the last token; one value for each replica that
        trained then."""
        seconds = [r.preemption_seconds(self.last_token) for r in self.replicas]
        return tuple(s for s in seconds if s is not None)

    @property
    def stats(self) -> EngineStats:
        total = EngineStats()
        for replica in self.replicas:
            total.add(replica.stats)
        return total

    def rollout_record(self) -> RolloutRecord:
        """Returns how the responses were generated."""
        lengths, stats = [len(rollout.token_ids) for rollout in self.rollouts], self.stats
        predicted = {name: s.predicted_speed for name, s in stats.by_strategy.items()}
        return RolloutRecord(
            seconds=self.seconds,
            num_responses=len(lengths),
            num_tokens=sum(lengths),
            response_tokens=LengthStats.of(lengths),
            truncated_share=sum(r.finish_reason == "length" for r in self.rollouts) / len(lengths),
            tokens_per_second=NAN if self.recalled_tokens else sum(lengths) / self.seconds,
            accept_length=_number(stats.accept_length),
            strategy_seconds={name: s.seconds for name, s in stats.by_strategy.items()},
            strategy_speed={name: s.speed for name, s in stats.by_strategy.items()},
            strategy_predicted={name: speed for name, speed in predicted.items() if speed is not None},
            draft_acceptance_rate=_number(stats.draft_acceptance_rate),
            draft_mean_acceptance_length=_number(stats.draft_mean_acceptance_length),
            draft_acceptance_rate_pos=tuple(stats.draft_acceptance_rate_pos),
            recalled_tokens=self.recalled_tokens,
            num_migrated=sum(replica.num_migrated for replica in self.replicas),
            num_preemptions=stats.num_preemptions,
            num_reread_tokens=stats.num_reread_tokens,
            groups_sampled=len(self.groups),
            groups_discarded=len(self.groups) - len(self.kept),
            resample_rounds=self.num_rounds - 1,
            followed_by_age=dict(sorted(stats.followed_by_age.items(), key=lambda of: (len(of[0]), of[0]))),
        )

    def drafter_record(self) -> DrafterCheck:
        """Returns the drafter's measurements, and what the ranks trained it on."""
        reports = [replica.drafter for replica in self.replicas]
        tokens = sum(report.num_tokens for report in reports)
        return replace(
            self.check or DrafterCheck(),
            tokens=tokens,
            loss=sum(r.loss * r.num_tokens for r in reports if r.num_tokens) / tokens if tokens else NAN,
            captured_tokens=sum(report.captured_tokens for report in reports),
            recomputed_tokens=sum(report.recomputed_tokens for report in reports),
            train_seconds=self.drafter_seconds,
        )

    def idle_record(self, worth: Mapping[IdleUse, Worth]) -> IdleRecord:
        """Returns what idle time was spent on. worth: the uses' estimated worth."""
        return IdleRecord(
            seconds=self.idle_seconds,
            harvested_share=self.drafter_seconds / self.idle_seconds if self.idle_seconds > 0 else NAN,
            preemption_seconds=self.preemption_seconds,
            seconds_by_use=self.idle_seconds_by_use,
            gain={use.value: one.gain for use, one in worth.items()},
            cost={use.value: one.cost for use, one in worth.items()},
            ahead_seconds=sum(replica.ahead.seconds for replica in self.replicas),
            ahead_tokens=sum(replica.ahead.num_tokens for replica in self.replicas),
        )


def _number(value: float | None) -> float:
    return NAN if value is None else value


def combine(rounds: Sequence[Sequence[ReplicaReport]]) -> list[ReplicaReport]:
    """Returns what each replica did in all rounds of a phase."""
    replicas = list(rounds[0])
    for later in rounds[1:]:
        last_token = max(replica.last_token for replica in replicas)
        replicas = [replica.then(report, last_token) for replica, report in zip(replicas, later, strict=True)]
    return replicas


class IncompleteBatch(RuntimeError):
    """Responses or rewards of a round are missing, or come twice or unasked."""


def check_complete(
    asked: Sequence[ResponseId],
    brought: Sequence[tuple[Collection[ResponseId], Collection[ResponseId]]],
    where: str,
) -> None:
    """Raises IncompleteBatch unless the ranks have brought each response once, with its reward.

    asked: ids of the requested responses.
    brought: by rank, the ids of (responses, rewards).
    where: begins the message.
    """
    responses, rewards = (Counter(one for rank in brought for one in rank[kind]) for kind in (0, 1))
    wanted = Counter(asked)
    for what, found in (
        ("have no response", wanted - responses),
        ("have no reward", wanted - rewards),
        ("were answered too often", (responses - wanted) | (rewards - wanted)),
    ):
        if found:
            counts = ", ".join(f"{len(ids)} by rank {rank}" for rank, (ids, _) in enumerate(brought))
            raise IncompleteBatch(
                f"{where}: {found.total()} of {len(asked)} requests {what}, such as {min(found)} "
                f"(responses: {counts}); nothing is trained on them"
            )
