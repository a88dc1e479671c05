"""Records a step: a line of metrics.jsonl, a row of the table, and the spans of its time. Measures nothing but seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tlt.accounts import IdleUse
from tlt.distributed.world import gather_objects
from tlt.report.metrics import NAN, LengthStats, StepRecord
from tlt.report.tracking import step_values
from tlt.rl.rewards import summarize
from tlt.rl.update import UpdateMetrics
from tlt.spans import SpanName
from tlt.training.rollout.idle_choice import Worth
from tlt.training.rollout.result import PhaseResult

if TYPE_CHECKING:
    from tlt.training.run import Run


def record(run: Run, phase: PhaseResult, update: UpdateMetrics, started: float, cpu_started: float) -> None:
    """Writes and prints the step that began at `started` on the wall's clock and at `cpu_started` on this process's."""
    ended = time.perf_counter()
    run.timeline.record(SpanName.STEP, started, ended)
    cpu_seconds = sum(gather_objects(run.world, time.process_time() - cpu_started))
    line = step_record(run.step, run.config.algorithm.name, phase, update, ended - started, cpu_seconds, run.idle.worth())
    run.check_folder()
    if run.metrics is not None:
        run.metrics.write(line)
    run.tracking.log(run.step + 1, step_values(line))
    run.console.step(line)
    if update.num_skipped:
        num_steps = run.config.algorithm.epochs * run.config.algorithm.minibatches
        skipped = f"{update.num_skipped} of {num_steps} optimizer steps are not taken"
        run.console.note(f"step {run.step + 1}: {skipped}, for no response counts in them")
    if phase.check is not None and phase.check.is_undone:
        run.console.note(f"step {run.step + 1}: the drafter's training was {phase.check.training}")
    run.timeline.flush()


def _number(value: float | None) -> float:
    return NAN if value is None else value


def idle_fields(phase: PhaseResult, worth: Mapping[IdleUse, Worth]) -> dict[str, Any]:
    """Returns what metrics.jsonl keeps of a step's idle time, and of what earlier idle time has brought."""
    return {
        "ahead_seconds": sum(replica.ahead.seconds for replica in phase.replicas),
        "ahead_tokens": sum(replica.ahead.num_tokens for replica in phase.replicas),
        "followed_by_age": dict(sorted(phase.stats.followed_by_age.items(), key=lambda pair: (len(pair[0]), pair[0]))),
        "won_seconds": phase.stats.won_seconds,
        "idle_seconds_by_use": phase.idle_seconds_by_use,
        "idle_gain": {use.value: one.gain for use, one in worth.items()},
        "idle_cost": {use.value: one.cost for use, one in worth.items()},
    }


def step_record(
    step: int,
    algorithm: str,
    phase: PhaseResult,
    update: UpdateMetrics,
    step_seconds: float,
    cpu_seconds: float,
    worth: Mapping[IdleUse, Worth],
) -> StepRecord:
    """Returns what metrics.jsonl keeps of a step. worth: of the uses of idle time."""
    lengths = [len(rollout.token_ids) for rollout in phase.rollouts]
    stats = phase.stats
    rewards = summarize(phase.rewards)
    reports = [replica.drafter for replica in phase.replicas]
    trained = [report for report in reports if report.num_tokens]
    check = phase.check
    drafter_tokens = sum(report.num_tokens for report in reports)
    return StepRecord(
        step=step,
        reward_mean=rewards.mean,
        solve_rate=rewards.solve_rate,
        num_responses=len(lengths),
        num_tokens=sum(lengths),
        response_tokens=LengthStats.of(lengths),
        truncated_share=sum(rollout.finish_reason == "length" for rollout in phase.rollouts) / len(lengths),
        zero_variance_groups=update.zero_variance_groups,
        loss=update.loss,
        grad_norm=update.grad_norm,
        entropy=update.entropy,
        clip_fraction=update.clip_fraction,
        kl=_number(update.kl),
        lr=update.lr,
        engine_trainer_logprob_gap=update.engine_trainer_logprob_gap,
        rollout_seconds=phase.seconds,
        update_seconds=update.seconds,
        step_seconds=step_seconds,
        cpu_seconds=cpu_seconds,
        idle_seconds=phase.idle_seconds,
        drafter_train_seconds=phase.drafter_seconds,
        harvested_share=phase.drafter_seconds / phase.idle_seconds if phase.idle_seconds > 0 else NAN,
        drafter_loss=sum(r.loss * r.num_tokens for r in trained) / drafter_tokens if trained else NAN,
        drafter_tokens=drafter_tokens,
        drafter_captured_tokens=sum(report.captured_tokens for report in reports),
        drafter_recomputed_tokens=sum(report.recomputed_tokens for report in reports),
        num_migrated=sum(replica.num_migrated for replica in phase.replicas),
        **idle_fields(phase, worth),
        num_preemptions=stats.num_preemptions,
        num_reread_tokens=stats.num_reread_tokens,
        preemption_seconds=phase.preemption_seconds,
        accept_length=_number(stats.accept_length),
        accept_by_depth=tuple(stats.accept_by_depth),
        draft_acceptance_rate=_number(stats.draft_acceptance_rate),
        draft_mean_acceptance_length=_number(stats.draft_mean_acceptance_length),
        draft_acceptance_rate_pos=tuple(stats.draft_acceptance_rate_pos),
        strategy_seconds={name: s.seconds for name, s in stats.by_strategy.items()},
        strategy_speed={name: s.speed for name, s in stats.by_strategy.items()},
        strategy_predicted={n: s.predicted_speed for n, s in stats.by_strategy.items() if s.predicted_speed is not None},
        tokens_per_second=(sum(lengths) - phase.recalled_tokens) / phase.seconds,
        policy_version=phase.rollouts[0].policy_version,
        drafter_version=check.version if check is not None else 0,
        finished_at=time.time(),
        drafter_acceptance=check.acceptance if check is not None else NAN,
        retrieval_acceptance=check.retrieval if check is not None else NAN,
        drafter_training=check.training if check is not None else "off",
        drafter_vocabulary=check.vocabulary if check is not None else 0,
        drafter_coverage=check.coverage if check is not None else NAN,
        reward_errors=rewards.num_errors,
        first_reward_error=rewards.first_error,
        algorithm=algorithm,
        groups_sampled=len(phase.groups),
        groups_discarded=len(phase.groups) - len(phase.kept),
        resample_rounds=phase.num_rounds - 1,
        recalled_tokens=phase.recalled_tokens,
        reward_parts=rewards.parts,
        reward_metrics=rewards.metrics,
        reward_by_task=rewards.reward_by_task,
        solve_rate_by_task=rewards.solve_rate_by_task,
    )
