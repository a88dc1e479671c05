"""The records of a step, and the reports of ranks they are made from.

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
    """An engine step without admissions, on the host's monotonic clock."""

    strategy: str
    num_running: int
    start: float
    end: float

    def shifted(self, seconds: float) -> TimedStep:
        return replace(self, start=self.start + seconds, end=self.end + seconds)


class IdleUse(StrEnum):
    AHEAD = "ahead"
    TRAIN = "train"
    REST = "rest"


@dataclass(frozen=True)
class IdleStretch:
    """Idle time in one use, on the host's monotonic clock."""

    use: IdleUse
    start: float
    end: float


@dataclass(frozen=True)
class DrafterReport:
    """Drafter training in one micro-step, one session or several.

    max_micro_step_seconds: bounds a preemption.
    preempted_at: of the latest session, on the host's monotonic clock; None: it was not.
    is_limited: whether a session reached MAX_PASSES over its data with idle time left.
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
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, later: AheadReport) -> AheadReport:
        steps, tokens = self.num_steps + later.num_steps, self.num_tokens + later.num_tokens
        return AheadReport(steps, tokens, self.seconds + later.seconds)


# ── the records of a step ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LengthStats:
    """Response lengths in tokens. Percentiles are interpolated linearly.

    mean: mean length.
    p50: median length.
    p95: length that 95 % of the responses do not exceed.
    max: longest response.
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
    """Linearly interpolated; NaN without values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else NAN


@dataclass(frozen=True)
class TurnsRecord:
    """The part of environments in a step; defaults: responses of one turn.

    per_response: mean number of the policy's turns.
    given_tokens: tokens that environments said.
    num_calls: calls of tools.
    num_errors: calls that failed.
    num_timeouts: calls that failed by time-out.
    wait_seconds: time in which responses waited for their environment, summed.
    out_of_turns_share: share of responses that reached environment.max_turns.
    kept_tokens: tokens of responses that went on, which the engine still had and did not read again.
    first_acceptance_length, later_acceptance_length: draft_mean_acceptance_length in the first turns of
        responses, and in the turns after an environment has spoken; NaN: no draft there.
    """

    per_response: float = 1.0
    given_tokens: int = 0
    num_calls: int = 0
    num_errors: int = 0
    num_timeouts: int = 0
    wait_seconds: float = 0.0
    out_of_turns_share: float = 0.0
    kept_tokens: int = 0
    first_acceptance_length: float = NAN
    later_acceptance_length: float = NAN


@dataclass(frozen=True)
class RolloutRecord:
    """The rollout of a step. Groups that dynamic sampling discarded are included.

    seconds: duration of the rollout phase.
    num_responses: responses of all ranks.
    num_tokens: response tokens of all ranks.
    response_tokens: lengths of the responses, without what an environment said.
    truncated_share: share of responses that reached their token limit.
    tokens_per_second: response tokens per second; NaN: some were recalled, so there is no rate.
    recalled_tokens: tokens of an earlier attempt, read from the journal.
    num_migrated: moves of a running response to an idle rank.
    num_preemptions: sequences put back to waiting for want of memory (rollout.kv_gib).
    num_reread_tokens: tokens of preempted sequences, and of those with a further turn, that were read again.
    groups_sampled: sampled groups, replacements included.
    groups_discarded: sampled groups that are not in the update.
    resample_rounds: rounds of dynamic sampling after the first.
    accept_length: tokens committed per verification, the bonus token included, OFF steps excluded.
    draft_acceptance_rate: accepted / drafted tokens, as vLLM counts them.
    draft_mean_acceptance_length: accepted drafted tokens per verification that drafted, plus one, as vLLM
        counts them.
    draft_acceptance_rate_pos: share of drafting verifications that accepted the token at position 1, 2, …,
        as vLLM counts them.
    strategy_seconds: engine seconds under each strategy, "off" included.
    strategy_speed: measured tokens per second under each strategy.
    followed_by_age: accepted tokens drafted from references, by the number of updates between the two
        policies.
    turns: the part of environments.
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
    turns: TurnsRecord = field(default_factory=TurnsRecord)


@dataclass(frozen=True)
class SpeedupPair:
    """A few responses that the leader generated twice, with speculation and without
    (training/speedup.py); defaults: nothing was measured in this step.

    speedup: tokens per second with speculation / without, prefills excluded.
    num_responses: initial batch size: the average of the step's rollout.
    num_tokens: response tokens of each of the two rollouts.
    num_different: responses whose tokens differ; 0 by the law, except for rounding.
    seconds: duration of the measurement, in which other ranks wait.
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
    solve_rate: share of responses that solved their problem.
    num_errors: responses that could not be scored.
    first_error: the first failure to score; empty: none.
    parts: reward function → mean before its weight, over the responses it applied to; empty without
        rewards.functions.
    metrics: figure logged by a function → mean.
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
    entropy: entropy of the policy before the update, in nats per token. It and the gaps are unbiased
        estimates where more than `SAMPLED_TOKENS` (training/update/update.py) tokens have no advantage.
    clip_fraction: share of tokens with a clipped ratio, averaged over the optimizer steps; NaN without any.
    kl: divergence from the reference policy, in nats per token; NaN: coefficient 0. Taken before the
        update if it is in the reward, else averaged over the optimizer steps.
    lr: learning rate of the step.
    zero_variance_groups: problems all of whose responses have advantage 0, or no score.
    engine_trainer_logprob_gap: mean of |engine's logprob - trainer's|, before the update.
    engine_trainer_logprob_gap_max: largest computed gap.
    seconds: duration of the update.
    num_tokens: tokens of scored responses.
    num_skipped: optimizer steps skipped: no token contributed to their loss.
    router_load_max: load of a layer's busiest expert / mean load of its experts, averaged over the layers; 1:
        balanced. This and the next two are of response tokens, before the update; NaN: no experts.
    router_load_entropy: entropy of the experts' loads / log(experts), averaged over the layers; 1: balanced.
    router_gap: share of the experts that the engine took and the update's router would not; NaN: no routes.
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
    router_load_max: float = NAN
    router_load_entropy: float = NAN
    router_gap: float = NAN


@dataclass(frozen=True)
class DrafterCheck:
    """The learned drafter at the end of a step, and its training; defaults: a run without a learned drafter.

    version: number of its publications.
    acceptance: mean over response tokens of sum_v min(p, q), the highest acceptance rate of a single
        draft; NaN: not measured in this step.
    retrieval: share of the same tokens that retrieval would have drafted.
    training: "trained", "trained; limit of passes reached" (idle time was left), "no idle time", "off", or
        "undone: …" with the reason.
    before: acceptance of the drafter in service before this step's training; NaN: not measured.
    publish_seconds: seconds of averaging over the ranks, loading into the engines and checking; slowest
        rank's.
    vocabulary: size of the draft vocabulary; 0: no drafter, or a fixed head.
    coverage: share of the step's tokens in the draft vocabulary; the rest can be sampled, but not drafted.
    tokens: tokens trained on, by all ranks.
    loss: mean over these tokens.
    captured_tokens: tokens trained on whose features the engine had captured.
    recomputed_tokens: tokens whose features took another forward of the target.
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
    harvested_share: share of it that trained the drafter.
    preemption_seconds: from the last response's end to the trainer's return, for each rank that was training.
    seconds_by_use: idle time until the phase's end, by use: ahead, train, rest.
    gain: by use, seconds saved of a step per second that a rank spends, as measured so far (docs/ahead.md).
    cost: by use, seconds added to a step per such second.
    ahead_seconds: seconds of generating later steps' responses.
    ahead_tokens: tokens generated for later steps.
    """

    seconds: float
    harvested_share: float
    preemption_seconds: tuple[float, ...]
    seconds_by_use: dict[str, float] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    ahead_seconds: float = 0.0
    ahead_tokens: int = 0
