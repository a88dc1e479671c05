"""What ranks give account of: their engine steps and idle time; and the five records of a step, each written
where it is measured: rollout and idle time by the phase (rollout/result.py), rewards, the update, the
drafter.

A quantity that does not exist, such as the accept length of a step without verification, is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

NAN = float("nan")


@dataclass(frozen=True)
class TimedStep:
    """An engine step without admissions, on the host's monotonic clock. strategy: its name.
    num_running: sequences in it."""

    strategy: str
    num_running: int
    start: float
    end: float

    def shifted(self, seconds: float) -> TimedStep:
        """Returns the same on another clock, which is so much ahead."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)


class IdleUse(StrEnum):
    """Names what a rank without work does: it generates later steps' responses, trains the drafter, or
    rests."""

    AHEAD = "ahead"
    TRAIN = "train"
    REST = "rest"


@dataclass(frozen=True)
class IdleStretch:
    """A stretch of idle time in one use, on the host's monotonic clock."""

    use: IdleUse
    start: float
    end: float


@dataclass(frozen=True)
class DrafterReport:
    """The account of drafter training: of one micro-step, one session or several.

    num_tokens: tokens trained on.
    captured_tokens: those of them whose features the engine had captured.
    recomputed_tokens: tokens that went through the target again for their features.
    loss: mean over the tokens trained on.
    max_micro_step_seconds: bounds how long a preemption can take.
    preempted_at: when the latest session returned because it was asked to (the host's monotonic clock); None:
        it was not.
    is_limited: a session ended because its data had been gone through drafter.max_passes times; idle time
        was left.
    """

    num_micro_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    loss: float = NAN
    max_micro_step_seconds: float = 0.0
    captured_tokens: int = 0
    recomputed_tokens: int = 0
    preempted_at: float | None = None
    is_limited: bool = False

    def plus(self, later: DrafterReport) -> DrafterReport:
        """Returns both reports as one."""
        trained = [report for report in (self, later) if report.num_tokens]
        num_tokens = self.num_tokens + later.num_tokens
        return DrafterReport(
            num_micro_steps=self.num_micro_steps + later.num_micro_steps,
            num_tokens=num_tokens,
            seconds=self.seconds + later.seconds,
            loss=sum(r.loss * r.num_tokens for r in trained) / num_tokens if trained else NAN,
            max_micro_step_seconds=max(self.max_micro_step_seconds, later.max_micro_step_seconds),
            captured_tokens=self.captured_tokens + later.captured_tokens,
            recomputed_tokens=self.recomputed_tokens + later.recomputed_tokens,
            preempted_at=later.preempted_at,
            is_limited=self.is_limited or later.is_limited,
        )


@dataclass(frozen=True)
class AheadReport:
    """The account of one session of generating ahead, or of several: engine steps, tokens, and seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, later: AheadReport) -> AheadReport:
        """Returns both as one."""
        steps, tokens = self.num_steps + later.num_steps, self.num_tokens + later.num_tokens
        return AheadReport(steps, tokens, self.seconds + later.seconds)


# ── the records of a step ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LengthStats:
    """The lengths of a step's responses, in tokens (of 128, say, p95 lies between the 121st and the
    122nd)."""

    mean: float
    p50: float
    p95: float
    max: int

    @staticmethod
    def of(lengths: Sequence[int]) -> LengthStats:
        if not lengths:
            return LengthStats(NAN, NAN, NAN, 0)
        return LengthStats(
            float(np.mean(lengths)), percentile(lengths, 50), percentile(lengths, 95), max(lengths)
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the linearly interpolated percentile; NaN of nothing."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else NAN


@dataclass(frozen=True)
class RolloutRecord:
    """How a step's responses were generated. `num_responses` and `num_tokens` count the groups that dynamic
    sampling discarded, too.

    truncated_share: of responses that reached their token limit.
    tokens_per_second: response tokens / seconds.  recalled_tokens: those of responses that an earlier attempt
        generated; the step found them in the journal, and they are not in `tokens_per_second`.
    num_migrated: responses that a rank which had run dry took over, each as often as it moved.
    num_preemptions: sequences that had to wait again for want of memory (rollout.kv_gib).
    num_reread_tokens: of those, the tokens that were read once more.
    groups_sampled: problems of the step, each as often as it was sampled.  groups_discarded: of those, not in
        the update.
    resample_rounds: rounds of dynamic sampling after the first.
    accept_length: tokens committed per verification, the bonus token included, OFF steps excluded.
    accept_by_depth: survival to depth 1, 2, …, of the verifications that drafted so deep.
    draft_acceptance_rate, draft_mean_acceptance_length, draft_acceptance_rate_pos: as vLLM counts them
        (engine/stats.py), the last for positions 1, 2, …
    strategy_seconds: engine seconds under each strategy, "off" included.
    strategy_speed: tokens per second of the engine steps under each.  strategy_predicted: what the tuner
        expected of them.
    followed_by_age: tokens that were drafted from references and kept, by the updates between the two
        policies; "replay": from another run's.
    won_seconds: by that, summed over ranks: what those tokens would have taken without, as the tuner
        predicts, less what they took.
    """

    seconds: float
    num_responses: int
    num_tokens: int
    response_tokens: LengthStats
    truncated_share: float
    tokens_per_second: float
    accept_length: float
    accept_by_depth: tuple[float, ...]
    strategy_seconds: dict[str, float]
    strategy_speed: dict[str, float]
    strategy_predicted: dict[str, float]
    draft_acceptance_rate: float = NAN
    draft_mean_acceptance_length: float = NAN
    draft_acceptance_rate_pos: tuple[float, ...] = ()
    recalled_tokens: int = 0
    num_migrated: int = 0
    num_preemptions: int = 0
    num_reread_tokens: int = 0
    groups_sampled: int = 0
    groups_discarded: int = 0
    resample_rounds: int = 0
    followed_by_age: dict[str, int] = field(default_factory=dict)
    won_seconds: float = 0.0


@dataclass(frozen=True)
class RewardSummary:
    """A step's rewards in numbers, as sampled for training: of the groups that dynamic sampling discarded,
    too. The means are over the responses that were scored, NaN where none was. `num_errors` counts the
    others; `first_error` says why the first of them was not scored, and is empty where there is none.

    parts: reward function → mean, before its weight, over the responses to which it applied; empty without
        rewards.functions.
    metrics: what the functions logged → mean.
    reward_by_task, solve_rate_by_task: by the problems' column `task`, as a mixture gives it; empty where
        they have none.
    """

    mean: float
    solve_rate: float
    num_errors: int = 0
    first_error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    reward_by_task: dict[str, float] = field(default_factory=dict)
    solve_rate_by_task: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateMetrics:
    """One update in numbers. Means are over the tokens of all ranks' scored responses; `loss`, `grad_norm`
    (before clipping), `clip_fraction` and `kl` also over the optimizer steps; NaN where there are none.
    `entropy` and the gaps are those of the policy before the update, estimated without bias where more than
    `SAMPLED_TOKENS` (rl/update.py) tokens have no advantage.

    kl: NaN when there is no reference policy (its coefficient is 0); before the update where it is in the
        reward.
    zero_variance_groups: problems all of whose responses have advantage 0, or no score.
    engine_trainer_logprob_gap: mean of |engine's logprob - trainer's|; `_max` the largest computed.
    num_tokens: of scored responses.  num_skipped: optimizer steps that were not taken, as no token was in
        their loss.
    """

    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    kl: float
    lr: float
    engine_trainer_logprob_gap: float
    zero_variance_groups: int
    seconds: float
    engine_trainer_logprob_gap_max: float = NAN
    num_tokens: int = 0
    num_skipped: int = 0


@dataclass(frozen=True)
class DrafterCheck:
    """The learned drafter at the end of a step, and its training in it; with the defaults, of a run that has
    none.

    version: counts its publications.
    acceptance: mean over response tokens of sum_v min(p, q), the most that one draft can be accepted with;
        NaN: not measured (drafter.check_every).
        retrieval: share of the same
        tokens that retrieval would have drafted.
    training: "trained", "trained; max_passes reached" (idle time was left), "no idle time", "off", or
        "undone: …" with the reason.
    before: the acceptance of the drafter that was in service before this step's training; NaN: not measured.
    publish_seconds: in which what was trained was averaged over the ranks, given to the engines, and seen to
        have arrived; of the slowest rank.
    vocabulary: tokens that it could propose in the step; 0: there is no drafter, or its head is its own.
        coverage: the part of the step's tokens among them; the others could be sampled, but not drafted.
    tokens: trained on, by all ranks.
    loss: their mean.
    captured_tokens: those of them whose features the engine had captured.
    recomputed_tokens: tokens that went through the target again for their features.
    train_seconds: of training within idle time, summed over ranks.
    """

    version: int = 0
    acceptance: float = NAN
    retrieval: float = NAN
    training: str = "off"
    before: float = NAN
    publish_seconds: float = 0.0
    vocabulary: int = 0
    coverage: float = NAN
    tokens: int = 0
    loss: float = NAN
    captured_tokens: int = 0
    recomputed_tokens: int = 0
    train_seconds: float = 0.0

    @property
    def is_undone(self) -> bool:
        return self.training.startswith("undone: ")


@dataclass(frozen=True)
class IdleRecord:
    """How ranks without work spent their time; seconds are summed over ranks.

    seconds: without work, up to the last token of all.
    harvested_share: the part of them in which the drafter was trained.
    seconds_by_use: without work until the phase's end: ahead, train, rest.
    gain, cost: by use, seconds by which a step becomes shorter, and longer, for every second that a rank
        spends on it, as measured so far (docs/ahead.md).
    ahead_seconds, ahead_tokens: in which responses of later steps were generated, and their tokens.
    preemption_seconds: from the last response's end to the return of the drafter's trainer, for every rank
        that trained then.
    """

    seconds: float
    harvested_share: float
    preemption_seconds: tuple[float, ...]
    seconds_by_use: dict[str, float] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    ahead_seconds: float = 0.0
    ahead_tokens: int = 0
