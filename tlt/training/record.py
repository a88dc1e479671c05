"""Records a step: a line of metrics.jsonl, figures for trackers, a row of the console, spans."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tlt.base.records import SpeedupPair, UpdateMetrics
from tlt.base.spans import SpanName
from tlt.tasks.rewards.pool import summarize
from tlt.training.ranks.world import gather_objects
from tlt.training.report.step_record import StepRecord
from tlt.training.rollout.result import PhaseResult

if TYPE_CHECKING:
    from tlt.training.run import Run

_SAMPLE_COLUMNS = ("step", "problem", "prompt", "response", "reward", "solved")


def record(
    run: Run,
    phase: PhaseResult,
    speedup: SpeedupPair,
    update: UpdateMetrics,
    started: float,
    cpu_started: float,
) -> None:
    """started, cpu_started: the step's begin, by time.perf_counter and time.process_time."""
    ended = time.perf_counter()
    run.timeline.record(SpanName.STEP, started, ended)
    cpu_seconds = sum(gather_objects(run.world, time.process_time() - cpu_started))
    line = StepRecord(
        step=run.step + 1,
        policy_version=phase.rollouts[0].policy_version,
        algorithm=run.config.algorithm.name,
        step_seconds=ended - started,
        cpu_seconds=cpu_seconds,
        finished_at=time.time(),
        rollout=phase.rollout_record(),
        rewards=summarize(phase.rewards),
        update=update,
        drafter=phase.drafter_record(),
        idle=phase.idle_record(run.models.idle_choice.worth()),
        speedup=speedup,
    )
    run.check_folder()
    if run.files.metrics is not None:
        run.files.metrics.write(line)
    run.tracking.log(line.step, line.figures())
    run.console.step(line)
    _show_samples(run, phase)
    if update.num_skipped:
        num_steps = run.config.algorithm.epochs * run.config.algorithm.minibatches
        skipped = f"{update.num_skipped} of {num_steps} optimizer steps are not taken"
        run.console.note(f"step {line.step}: {skipped}, for no response counts in them")
    if phase.check is not None and phase.check.is_undone:
        run.console.note(f"step {line.step}: the drafter's training was {phase.check.training}")
    run.timeline.flush()


def _show_samples(run: Run, phase: PhaseResult) -> None:
    num_all = len(phase.rollouts)
    num = min(run.config.run.show_samples, num_all)
    if not (num and run.world.is_leader):
        return
    rows = []
    for index in (i * num_all // num for i in range(num)):
        rollout, reward = phase.rollouts[index], phase.rewards[index]
        prompt, text = run.data.decode(rollout.prompt_ids), run.data.decode(rollout.token_ids)
        value = reward.value if reward.is_scored else None
        run.console.sample(prompt, text, value)
        rows.append((run.step + 1, rollout.problem_id, prompt, text, value, reward.is_solved))
    run.tracking.log_table(run.step + 1, "samples", _SAMPLE_COLUMNS, rows)
