"""THE loop: the whole method, step by step, on every rank.

for step in steps:   problems ─▶ sample: responses and rewards;  ─▶ update: the policy ─▶ publish ─┐
                        ▲        idle ranks train the drafter                                      │
                        └─────────────── the engines generate with the new policy ◀────────────────┘
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from tlt.base.clock import Moment
from tlt.base.config.schema import Config
from tlt.base.io.text import quoted
from tlt.base.records import IdleUse
from tlt.base.spans import SpanName
from tlt.base.types import Request, UserError
from tlt.tasks.rewards.pool import check_scorable, describe_constant
from tlt.training.build.layout import join_ranks
from tlt.training.build.problems import problems_of_step, spare_problems
from tlt.training.evaluate import evaluate, settle_best
from tlt.training.idle.ahead import AheadOfPolicy
from tlt.training.idle.protocol import NO_AHEAD, Ahead
from tlt.training.idle.work import IdleWork
from tlt.training.ranks.store import share_stop
from tlt.training.ranks.waiting import naming_absent_ranks, on_leader
from tlt.training.ranks.world import Rendezvous, broadcast_json, gather_objects, shutdown
from tlt.training.record import record
from tlt.training.report.words import near
from tlt.training.rollout.dynamic import DynamicSampling
from tlt.training.rollout.phase import StopRequested
from tlt.training.rollout.result import PhaseResult
from tlt.training.run import Run
from tlt.training.run_products import write_evaluation, write_products
from tlt.training.saved.manifest import latest_checkpoint
from tlt.training.saved.run_folder import explain_os_error
from tlt.training.speedup import measure_speedup
from tlt.training.update.finite import NonFiniteUpdate

if TYPE_CHECKING:
    from tlt.training.launch.signals import StopRequest


def train(run: Run) -> None:
    config = run.config
    try:
        say_if_done(run)
        settle_best(run)
        if is_evaluation_due(run):
            evaluate(run)
        step_seconds = 0.0
        while run.step < config.run.num_steps and not is_out_of_time(run, step_seconds):
            began = time.perf_counter()
            advance(run)
            step_seconds = time.perf_counter() - began
            if is_evaluation_due(run):
                evaluate(run)
            if is_due(run, config.run.checkpoint_every):
                run.checkpoint()
        if run.step < config.run.num_steps:
            done = f"after {run.step} of {config.run.num_steps} steps"
            run.console.note(
                f"run.time_limit_minutes, {config.run.time_limit_minutes:g}, ends the run {done}; "
                f"go on with: tlt train --resume {quoted(run.out_dir)}"
            )
        evaluate(run)
        (finish if config.run.num_steps else finish_evaluation)(run)
    except StopRequested as where:
        stop_early(run, str(where))


def advance(run: Run) -> PhaseResult:
    started, cpu_started = time.perf_counter(), time.process_time()
    phase = sample(run)
    speedup = measure_speedup(run, phase)
    if run.step == 0:
        check_scorable(phase.rewards, run.config.task.name, "step 1")
        for line in describe_constant(phase.rewards, "step 1"):
            run.console.note(line)
    with run.timeline.span(SpanName.UPDATE), run.console.status("updating the policy", is_noted=False):
        update = run.models.trainer.update(*phase.for_update, run.step)
    with run.console.status("publishing the policy", is_noted=False):
        run.publish(run.step + 1)
    record(run, phase, speedup, update, started, cpu_started)
    run.step += 1
    return phase


def sample(run: Run) -> PhaseResult:
    rollout, seed = run.config.rollout, run.config.run.seed
    num, num_samples = rollout.problems_per_step, rollout.samples_per_problem
    problems = problems_of_step(run.data.problems, run.step, num, seed)
    dynamic_sampling = None
    if run.models.trainer.algorithm.dynamic_sampling:
        spare = spare_problems(run.data.problems, run.step, num, seed)
        dynamic_sampling = DynamicSampling(num, num_samples, spare)
    plan, steps_left = run.models.idle_choice.plan(run.step), run.config.run.num_steps - run.step - 1
    params, training = run.data.params, run.models.drafter_training
    idle_work = IdleWork(ahead_work(run, IdleUse.AHEAD in plan.order), training, plan)
    training.foresee(problem.prompt_ids for problem in problems)
    phase = run.phase.run(problems, num_samples, params, "rollout", run.step, idle_work, dynamic_sampling)
    run.keep_responses("rollout", phase)
    run.note_lengths(phase.rollouts)
    run.models.idle_choice.observe(phase.idle_facts(idle_work.ahead.num_offered, steps_left), phase.slowdown)
    return phase


def ahead_work(run: Run, generates: bool) -> Ahead:
    """generates: False: only this step's references count."""
    rollout, last = run.config.rollout, run.config.run.num_steps - 1
    if not rollout.steps_ahead:
        return NO_AHEAD

    def requests_of(step: int) -> list[Request]:
        return [
            Request(problem.problem_id, index, problem.prompt_ids, run.data.params, "rollout", step)
            for problem in problems_of_step(
                run.data.problems, step, rollout.problems_per_step, run.config.run.seed
            )
            for index in range(rollout.samples_per_problem)
        ]

    later = range(run.step + 1, min(run.step + rollout.steps_ahead, last) + 1) if generates else ()
    requests = [request for step in later for request in requests_of(step)]
    past = requests_of(run.step)
    return AheadOfPolicy(
        run.models.engine, run.models.references, run.world.world_size, requests, past, run.lengths
    )


# ── what is due ─────────────────────────────────────────────────────────────────────────────────────────────


def is_due(run: Run, every: int) -> bool:
    """False after the last step, which the run's end covers. every: steps; 0: never."""
    return bool(every) and run.step % every == 0 and run.step < run.config.run.num_steps


def is_evaluation_due(run: Run) -> bool:
    was_begun = any(evaluation.step == run.step for evaluation in run.files.evaluations.all)
    return run.step == 0 or was_begun or is_due(run, run.config.evaluation.every)


def is_out_of_time(run: Run, step_seconds: float) -> bool:
    """By the leader's clock: whether a step and the last evaluation would end too late.

    step_seconds: of the step before; 0: none was.
    """
    limit = run.config.run.time_limit_minutes
    ends = run.seconds + step_seconds + run.files.evaluations.latest_seconds
    return limit is not None and bool(broadcast_json(run.world, ends > 60 * limit))


# ── how a run ends ──────────────────────────────────────────────────────────────────────────────────────────


def say_if_done(run: Run) -> None:
    num_steps, folder = run.config.run.num_steps, near(run.out_dir)
    if not run.first_step or run.step < num_steps:
        return
    more = f"for more of them: tlt train --resume {quoted(folder)} --run.num_steps {2 * num_steps}"
    if run.config.optimizer.depends_on_num_steps:
        more = f"its learning rate ends there, so more of them are a new run, from {folder}/policy"
    run.console.note(f"nothing is left to do: all {num_steps} steps are done; {more}")


def finish(run: Run) -> None:
    save_state(run)
    with run.console.status("writing the policy", is_noted=False):
        run.save_policy(run.out_dir / "policy")
        if run.config.lora.is_used:
            run.save_adapter(run.out_dir / "adapter")
    on_leader(run.world, f"{run.out_dir}: the other products", lambda: write_products(run))


def finish_evaluation(run: Run) -> None:
    run.timeline.flush()
    on_leader(run.world, f"{run.out_dir}: the evaluation", lambda: write_evaluation(run))


def stop_early(run: Run, where: str) -> None:
    """The unfinished step will be generated again, token for token."""
    save_state(run)
    run.console.note(
        f"stopped {where}; {run.step} updates are kept. "
        f"Continue with: tlt train --resume {quoted(run.out_dir)}"
    )


def save_state(run: Run) -> None:
    with run.console.status("writing a checkpoint", is_noted=False):
        run.checkpoint()
        run.files.checkpoints.wait()
    run.timeline.flush()
    gather_objects(run.world, None)


# ── the process of a rank ───────────────────────────────────────────────────────────────────────────────────


def describe_run(config: Config, began: Moment) -> str:
    """The argument of `main`, the same for all ranks. began: start of the user's command."""
    return json.dumps({"config": config.to_json(), "began": asdict(began.to_send())})


def main(description: str, stop: StopRequest, met: Rendezvous | None = None) -> None:
    """The entry of every rank. met: their rendezvous, if it has taken place."""
    described = json.loads(description)
    config = Config.from_json(described["config"])
    world = join_ranks(config, met)
    if world.watch is not None:
        share_stop(world.store, stop, world.watch)
    try:
        with naming_absent_ranks(world):
            run = Run(config, world, stop, began=Moment(**described["began"]).here())
            try:
                train(run)
            finally:
                run.close()
    except NonFiniteUpdate as error:
        kept = latest_checkpoint(config.run.out_dir / "checkpoints")
        left = "no checkpoint is kept" if kept is None else f"the last checkpoint is {kept}"
        raise UserError(f"{error}; {left}") from None
    except OSError as error:
        if (mistake := explain_os_error(error, config.run.out_dir)) is None:
            raise
        raise mistake from error
    del run  # what refers to the ranks' group must be gone before `shutdown`
    # A signal reaches one rank; the run has ended on all of them.
    stop.signal = next(filter(None, gather_objects(world, stop.signal)), None)
    shutdown(world)
