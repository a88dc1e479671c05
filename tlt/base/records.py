"""Reports of ranks about engine steps and idle time, and the six records of a step, each written where it is
measured: rollout and idle time by the phase (training/rollout/result.py), rewards, the update, the drafter,
the pair of rollouts with and without speculation.

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
    """An engine step without admissions, on the host's monotonic clock.

    strategy: its name.
    num_running: sequences in the batch.
    """

    strategy: str
    num_running: int
    start: float
    end: float

    def shifted(self, seconds: float) -> TimedStep:
        """Returns the same step on a clock that is `seconds` ahead."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)


class IdleUse(StrEnum):
    """The uses of idle time: generate later steps' responses, train the drafter, rest."""

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
    """The report of drafter training in one micro-step, one session or several.

    num_tokens: tokens trained on.
    loss: mean over these tokens.
    max_micro_step_seconds: the longest micro-step, which bounds a preemption.
    captured_tokens: tokens trained on whose features the engine had captured.
    recomputed_tokens: tokens that went through the target again for their features.
    preempted_at: time when the latest session was preempted (the host's monotonic clock); None: it was not.
    is_limited: whether a session ended after MAX_PASSES over its data, with idle time left.
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
    """The report of generating ahead in one session or several."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, later: AheadReport) -> AheadReport:
        """Returns both reports as one."""
        steps, tokens = self.num_steps + later.num_steps, self.num_tokens + later.num_tokens
        return AheadReport(steps, tokens, self.seconds + later.seconds)


# ── the records of a step ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LengthStats:
    """Statistics of response lengths in tokens. Percentiles are interpolated linearly.

    mean: the mean length.
    p50: the median length.
    p95: the length that 95 % of the responses do not exceed.
    max: the longest response.
    """

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
    """Returns the linearly interpolated percentile; NaN without values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else NAN


@dataclass(frozen=True)
class RolloutRecord:
    """The rollout of a step. Groups that dynamic sampling discarded are included.

    seconds: duration of the rollout phase.
    num_responses: responses of all ranks.
    num_tokens: response tokens of all ranks.
    response_tokens: statistics of the responses' lengths.
    truncated_share: share of responses that reached their token limit.
    tokens_per_second: response tokens per second; NaN: some were recalled, so there is no rate.
    recalled_tokens: tokens that an earlier attempt had generated, found in the journal.
    num_migrated: moves of a running response to an idle rank.
    num_preemptions: sequences that had to wait again for want of memory (rollout.kv_gib).
    num_reread_tokens: tokens of preempted sequences that were read again.
    groups_sampled: problems of the step, each as often as it was sampled.
    groups_discarded: sampled groups that are not in the update.
    resample_rounds: rounds of dynamic sampling after the first.
    accept_length: tokens committed per verification, the bonus token included, OFF steps excluded.
    draft_acceptance_rate: accepted drafted tokens over drafted tokens, as vLLM counts them.
    draft_mean_acceptance_length: accepted drafted tokens per verification that drafted, plus one, as vLLM
        counts them.
    draft_acceptance_rate_pos: share of verifications that drafted in which the drafted token at position 1,
        2, … was accepted, as vLLM counts them.
    strategy_seconds: engine seconds under each strategy, "off" included.
    strategy_speed: measured tokens per second of the engine steps under each strategy.
    strategy_predicted: the tuner's prediction of strategy_speed.
    followed_by_age: tokens drafted from references and kept, by the number of updates between the two
        policies.
    """

    seconds: float
    num_responses: int
    num_tokens: int
    response_tokens: LengthStats
    truncated_share: float
    tokens_per_second: float
    accept_length: float
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


@dataclass(frozen=True)
class SpeedupPair:
    """A few responses that the leader generated twice, with speculation and without
    (training/rollout/speedup.py); the defaults stand for a step in which nothing was measured.

    speedup: how many times as fast it was with speculation: the ratio of tokens per second, prefills aside.
    num_responses: responses that ran at a time, at first: as many as in the step's rollout on average.
    num_tokens: their tokens in each of the two rollouts.
    num_different: responses whose tokens were not the same; by the law 0 but for roundings.
    seconds: of the whole measurement, in which other ranks wait.
    """

    speedup: float = NAN
    num_responses: int = 0
    num_tokens: int = 0
    num_different: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RewardSummary:
    """The rewards of a step. Groups that dynamic sampling discarded are included. Means are over the scored
    responses; NaN: none was scored.

    mean: mean reward.
    std: standard deviation of the rewards.
    solve_rate: share of the responses that solved their problem.
    num_errors: responses that could not be scored.
    first_error: why the first of them could not; empty: all were scored.
    parts: reward function → mean before its weight, over the responses to which it applied; empty without
        rewards.functions.
    metrics: figure that a function logged → mean.
    reward_by_task: mean reward by the problems' column `task`, as a mixture gives it; empty without.
    solve_rate_by_task: solve rate by the same column; empty without.
    """

    mean: float
    solve_rate: float
    num_errors: int = 0
    first_error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    reward_by_task: dict[str, float] = field(default_factory=dict)
    solve_rate_by_task: dict[str, float] = field(default_factory=dict)
    std: float = NAN


@dataclass(frozen=True)
class UpdateMetrics:
    """One update of the policy. Means are over the tokens of all ranks' scored responses.

    loss: the algorithm's loss, averaged over the optimizer steps, too; NaN without any.
    grad_norm: norm of the gradient before clipping, averaged over the optimizer steps; NaN without any.
    entropy: entropy of the policy before the update, in nats per token. It and the gaps are estimated without
        bias where more than `SAMPLED_TOKENS` (training/update/update.py) tokens have no advantage.
    clip_fraction: share of tokens with a clipped ratio, averaged over the optimizer steps; NaN without any.
    kl: divergence from the reference policy, in nats per token; NaN without one (coefficient 0). Where it is
        in the reward it is taken before the update, else averaged over the optimizer steps.
    lr: learning rate of the step.
    zero_variance_groups: problems all of whose responses have advantage 0, or no score.
    engine_trainer_logprob_gap: mean of |engine's logprob - trainer's|, before the update.
    engine_trainer_logprob_gap_max: the largest computed gap.
    seconds: duration of the update.
    num_tokens: tokens of scored responses.
    num_skipped: optimizer steps that were not taken, as no token was in their loss.
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
    """The learned drafter at the end of a step, and its training; the defaults stand for a run without one.

    version: number of its publications.
    acceptance: mean over response tokens of sum_v min(p, q), the highest acceptance rate of a single draft;
        NaN: not measured (drafter.check_every).
    retrieval: share of the same tokens that retrieval would have drafted.
    training: "trained", "trained; limit of passes reached" (idle time was left), "no idle time", "off", or
        "undone: …" with the reason.
    before: acceptance of the drafter in service before this step's training; NaN: not measured.
    publish_seconds: seconds of averaging over the ranks, giving to the engines and checking; slowest rank's.
    vocabulary: size of the draft vocabulary in the step; 0: there is no drafter, or it has a fixed head.
    coverage: share of the step's tokens in the draft vocabulary; the others can be sampled, but not drafted.
    tokens: tokens trained on, by all ranks.
    loss: mean over these tokens.
    captured_tokens: tokens trained on whose features the engine had captured.
    recomputed_tokens: tokens that went through the target again for their features.
    train_seconds: seconds of training within idle time, summed over ranks.
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
    """The idle time of a step; seconds are summed over ranks.

    seconds: idle time up to the last token of all.
    harvested_share: share of it in which the drafter was trained.
    preemption_seconds: from the last response's end to the trainer's return, for each rank that trained then.
    seconds_by_use: idle time until the phase's end, by use: ahead, train, rest.
    gain: by use, seconds by which a step becomes shorter for each second that a rank spends on it, as
        measured so far (docs/ahead.md).
    cost: by use, seconds by which a step becomes longer for each such second.
    ahead_seconds: seconds of generating later steps' responses.
    ahead_tokens: tokens generated then.
    """

    seconds: float
    harvested_share: float
    preemption_seconds: tuple[float, ...]
    seconds_by_use: dict[str, float] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    ahead_seconds: float = 0.0
    ahead_tokens: int = 0
