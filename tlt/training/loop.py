"""THE loop: rollout phase → update → publish → record → evaluate → checkpoint. What it drives is made in run.py.

    for step in steps:      problems ─▶ phase (responses, rewards; idle ranks train the drafter) ─▶ policy update
                               ▲                                                                      │
                               └──────────── publish: the engines load the new policy ◀───────────────┘

The same program runs on every rank; what rank 0 does besides is write files and print.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.accounts import IdleUse
from tlt.clock import Moment
from tlt.config.schema import Config
from tlt.hf.weights import StoredTensors, content_hash
from tlt.io.plugins import is_importable
from tlt.ranks.store import share_stop
from tlt.ranks.waiting import naming_absent_ranks, on_leader
from tlt.ranks.world import Rendezvous, broadcast_json, gather_objects, shutdown
from tlt.report.console import near
from tlt.report.outcome import Outcome, evaluation_rows, summary_rows
from tlt.report.record import read_metrics
from tlt.report.timeline import merge_timelines
from tlt.rewards.pool import check_scorable
from tlt.rl.finite import NonFiniteUpdate
from tlt.rollout.dynamic import DynamicSampling
from tlt.rollout.idle_time import IdleWork, facts_of
from tlt.rollout.phase import StopRequested
from tlt.rollout.result import PhaseResult
from tlt.saved.manifest import latest_checkpoint
from tlt.saved.responses import FOLDER as RESPONSES
from tlt.saved.run_folder import explain_os_error, forget_journal
from tlt.spans import SpanName
from tlt.training.evaluate import evaluate, settle_best
from tlt.training.next_steps import ahead_of
from tlt.training.problems import data_source, problems_of_step, spare_problems
from tlt.training.record import record
from tlt.training.run import Run, join_ranks
from tlt.types import UserError

if TYPE_CHECKING:
    from tlt.launch.signals import StopRequest


def describe_run(config: Config, began: Moment) -> str:
    """Returns what the ranks have to know, for `main` to read. began: the user's command."""
    return json.dumps({"config": config.to_json(), "began": asdict(began.told())})


def main(description: str, stop: StopRequest, met: Rendezvous | None = None) -> None:
    """Runs on every rank; `launch` calls it. met: the ranks, where they have met already."""
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
        raise UserError(
            f"{error}; " + ("no checkpoint is kept" if kept is None else f"the last checkpoint is {kept}")
        ) from None
    except OSError as error:
        if (mistake := explain_os_error(error, config.run.out_dir)) is None:
            raise
        raise mistake from error
    del run
    stop.signal = next(
        filter(None, gather_objects(world, stop.signal)), None
    )  # one rank has heard it, and the run has ended
    shutdown(world)


def train(run: Run) -> None:
    """Goes from where the last checkpoint left off to the last step, or to the user's stop."""
    config = run.config
    try:
        settle_best(run)
        if is_evaluation_due(run):
            evaluate(run)
        while run.step < config.run.num_steps and not is_out_of_time(run):
            advance(run)
            if is_evaluation_due(run):
                evaluate(run)
            if is_due(run, config.run.checkpoint_every):
                run.checkpoint()
        if run.step < config.run.num_steps:
            ended = f"after {run.step} of {config.run.num_steps} steps; go on with: tlt train --resume {run.out_dir}"
            run.console.note(
                f"run.time_limit_minutes, {config.run.time_limit_minutes:g}, ends the run {ended}"
            )
        evaluate(run)
        (finish if config.run.num_steps else finish_evaluation)(run)
    except StopRequested as where:
        stop_early(run, str(where))


def advance(run: Run) -> PhaseResult:
    """Takes one step; `tlt bench train` measures this very function."""
    started, cpu_started = time.perf_counter(), time.process_time()
    phase = sample(run)
    if run.step == 0:
        check_scorable(phase.rewards, run.config.task.name, "step 1")
    with run.timeline.span(SpanName.UPDATE):
        update = run.trainer.update(*phase.for_update, run.step)
    run.publish(run.step + 1)
    record(run, phase, update, started, cpu_started)
    run.step += 1
    return phase


def sample(run: Run) -> PhaseResult:
    """Generates and scores the step's responses; with dynamic sampling also those to further problems."""
    rollout, seed = run.config.rollout, run.config.run.seed
    num, num_samples = rollout.problems_per_step, rollout.samples_per_problem
    problems = problems_of_step(run.problems, run.step, num, seed)
    sampling = None
    if run.trainer.algorithm.dynamic_sampling:
        spare = spare_problems(run.problems, run.step, num, seed)
        sampling = DynamicSampling(num, num_samples, run.config.algorithm.max_resamples, spare)
    plan, steps_left = run.idle.plan(run.step), run.config.run.num_steps - run.step - 1
    idle = IdleWork(ahead_of(run, IdleUse.AHEAD in plan.order), plan)
    run.drafter.foresee(problem.prompt_ids for problem in problems)
    with run.replay.lend("rollout", run.step, run.step):
        phase = run.phase.run(
            problems, num_samples, run.params, "rollout", run.step, run.drafter, sampling, idle
        )
    run.keep_responses("rollout", phase)
    run.note_lengths(phase.rollouts)
    run.idle.observe(facts_of(phase, idle.ahead.num_offered, steps_left), phase.slowdown)
    return phase


def is_due(run: Run, every: int) -> bool:
    """Whether something that is done every `every` steps (0: never) is due now. After the last step it is
    done anyway."""
    return bool(every) and run.step % every == 0 and run.step < run.config.run.num_steps


def is_evaluation_due(run: Run) -> bool:
    """Whether to evaluate now, unless that has been done: a resumed run may begin where a stop has kept it
    from that, or where an evaluation is incomplete."""
    was_begun = any(evaluation.step == run.step for evaluation in run.evaluations.all)
    return run.step == 0 or was_begun or is_due(run, run.config.evaluation.every)


def is_out_of_time(run: Run) -> bool:
    """Whether another step could make the run, its last evaluation included, exceed its limit. The
    leader's clock decides."""
    limit = run.config.run.time_limit_minutes
    spent = run.seconds + run.evaluations.latest_seconds
    return limit is not None and bool(broadcast_json(run.world, spent > 60 * limit))


def finish(run: Run) -> None:
    """Writes the run's products: the policy and the drafter, each as others load it, and the picture of
    the time."""
    run.checkpoint()
    run.checkpoints.wait()
    run.timeline.flush()
    gather_objects(run.world, None)
    run.save_policy(run.out_dir / "policy")
    if run.config.lora.rank:
        run.save_adapter(run.out_dir / "adapter")
    on_leader(run.world, f"{run.out_dir}: the other products", lambda: write_products(run))


def finish_evaluation(run: Run) -> None:
    """Ends a run that has trained nothing: there is no policy to write, and no checkpoint."""
    run.timeline.flush()
    on_leader(run.world, f"{run.out_dir}: the evaluation", lambda: write_evaluation(run))


def write_evaluation(run: Run) -> None:
    """Says what the evaluation of the model as it is has found. Rank 0 does it."""
    forget_journal(run.out_dir)
    names = ["evaluations.jsonl", "config.json", *([RESPONSES] if run.responses is not None else [])]
    products = {name: run.out_dir / name for name in names}
    run.console.summary(
        [*evaluation_rows(run.evaluations.all[-1].by_problem, run.seconds, products)], [], "evaluated"
    )


def write_products(run: Run) -> None:
    """Writes what others load beside the policy, and says what there is. Rank 0 does it."""
    folder = run.out_dir
    forget_journal(folder)  # the last checkpoint has all of it
    policy_hash = content_hash(StoredTensors(folder / "policy", run.policy.config))
    run.drafter.save(folder / "drafter", {"policy_hash": policy_hash, "policy_step": run.step})
    for missing in merge_timelines(folder, folder / "timeline.json"):
        run.console.note(missing)
    names = [
        "policy",
        "adapter",
        "best",
        "drafter",
        "evaluations.jsonl",
        "metrics.jsonl",
        "config.json",
        "timeline.json",
    ]
    names += [RESPONSES] if run.responses is not None else []
    products = {name: folder / name for name in names if (folder / name).exists()}
    recorded = recorded_seconds(run) if run.first_step else None
    told = run.evaluations.progress(), run.evaluations.left_out(), run.step, run.seconds
    outcome = Outcome(*told, recorded, drafted_from(run))
    run.console.summary([*summary_rows(outcome, products)], next_commands(run.config, products))


def drafted_from(run: Run) -> tuple[int, float] | None:
    """Returns the size of the last step's draft vocabulary and what it covered; None where that was the
    whole one, or nothing was drafted."""
    records = read_metrics(run.out_dir / "metrics.jsonl")
    size = records[-1].drafter.vocabulary if records else 0
    return (size, records[-1].drafter.coverage) if 0 < size < run.policy.config.vocab_size else None


def recorded_seconds(run: Run) -> float:
    """Returns what all steps and evaluations of the run took, whichever attempt did them."""
    steps = (record.step_seconds for record in read_metrics(run.out_dir / "metrics.jsonl"))
    return sum(steps) + sum(evaluation.seconds for evaluation in run.evaluations.all)


def next_commands(config: Config, products: Mapping[str, Path]) -> list[str]:
    """Returns commands that use what the run has made: held-out problems of its task, and the policy's
    responses to them. There are none for a task that lives in this process alone."""
    if not is_importable(config.task.name):
        return []
    source = data_source(config, "test") or (
        data_source(config, "train") if config.task.name == "data" else None
    )
    if source is not None:
        name = near(source.name) if source.name.exists() else str(source.name)
        given = {
            "data": name,
            "subset": source.subset,
            "split": source.split,
            "columns": dict(source.columns),
        }
    else:
        given = {"split": "test", "options": config.task.options}
    task = f"tlt task {shlex.quote(config.task.name)} --num 8 --out problems.jsonl{_options(given)}"
    asked = {
        "max-tokens": str(config.sampling.max_tokens),
        "chat": "true" if config.task.chat else None,
        "system-prompt": config.task.system_prompt,
        "chat-template-kwargs": config.model.chat_template_kwargs,
    }
    if "drafter" in products:
        asked |= {"speculation": "adaptive", "drafter": near(products["drafter"])}
    policy = shlex.quote(near(products["policy"]))
    return [task, f"tlt generate {policy} --prompts problems.jsonl --out responses.jsonl{_options(asked)}"]


def _options(given: Mapping[str, Any]) -> str:
    """Returns options as one types them; those without a value are left out."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items() if value
    }
    return "".join(f" --{name} {shlex.quote(text)}" for name, text in texts.items())


def stop_early(run: Run, where: str) -> None:
    """Ends the run where the user stopped it. Its last finished step is kept; the unfinished one will be
    generated again, token for token."""
    run.checkpoint()
    run.checkpoints.wait()
    gather_objects(run.world, None)
    run.timeline.flush()
    run.console.note(
        f"stopped {where}; {run.step} updates are kept. Continue with: tlt train --resume {run.out_dir}"
    )
