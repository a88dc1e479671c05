"""Evaluates the policy on held-out problems, always with the same noise: evaluations are paired."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

from tlt.base.io.files import read_file, remove_own
from tlt.base.records import RewardSummary
from tlt.base.spans import SpanName
from tlt.base.types import Request
from tlt.tasks.rewards.pool import check_scorable, summarize
from tlt.training.ranks.world import broadcast_json
from tlt.training.report.words import near, when
from tlt.training.run import Run
from tlt.training.saved.evaluations import Evaluation
from tlt.training.saved.run_folder import PRODUCTS

MARK = "tlt_evaluation"


# ── best/ ───────────────────────────────────────────────────────────────────────────────────────────────────


def keep_best(run: Run, evaluation: Evaluation) -> None:
    mark = {"step": evaluation.step, "solve_rate": evaluation.solve_rate, "reward": evaluation.reward}
    run.save_policy(run.out_dir / "best", {MARK: mark})


def settle_best(run: Run) -> None:
    """A resumed run may have lost the evaluation behind best/."""
    folder, best = run.out_dir / "best", run.files.evaluations.best
    held = broadcast_json(run.world, read_mark(folder) if run.world.is_leader else None)
    if held is None or (best is not None and best.step == held):
        return
    gone = f"{near(folder)}: was of the evaluation {when(held)}, which the run has gone back behind"
    if best is not None and best.step == run.step:
        keep_best(run, best)
        run.console.note(f"{gone}; now it is of the one {when(best.step)}")
        return
    if run.world.is_leader:
        remove_own(folder.resolve(), PRODUCTS["best"])
    lost = ""
    if best is not None:
        lost = f", and the best policy left, that {when(best.step)}, had been replaced by it"
    run.console.note(f"{gone}{lost}; it is removed until an evaluation is better")


def read_mark(folder: Path) -> int | None:
    """The step of best/; None: no best/, or no mark."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(read_file(folder / "config.json"))[MARK]["step"])
    return None


# ── evaluating ──────────────────────────────────────────────────────────────────────────────────────────────


def evaluate(run: Run) -> None:
    settings = run.config.evaluation
    if not run.data.held_out or run.files.evaluations.is_done(run.step):
        return
    params = dataclasses.replace(run.data.params, temperature=settings.temperature)
    with (
        run.timeline.span(SpanName.EVALUATE),
        run.console.status(f"evaluating on {len(run.data.held_out)} held-out problems"),
    ):
        run.models.drafter_training.foresee(problem.prompt_ids for problem in run.data.held_out)
        phase = run.phase.run(run.data.held_out, settings.num_samples, params, "evaluation", 0)
    run.keep_responses("evaluation", phase)
    for rollout in phase.rollouts:  # the next evaluation draws with the same noise
        request = Request(rollout.problem_id, rollout.sample_index, rollout.prompt_ids, params, "evaluation")
        run.models.references.keep(request.noise_key, rollout.token_ids, rollout.policy_version)
    if run.step == 0:  # later, a failed evaluation must not end the run
        check_scorable(phase.rewards, run.config.task.name, "the evaluation before training")
    report(run, Evaluation.of(run.step, phase), summarize(phase.rewards))


def report(run: Run, evaluation: Evaluation, rewards: RewardSummary) -> None:
    if rewards.num_errors:
        counts = f"evaluation {when(run.step)}: {rewards.num_errors} responses could not be scored"
        run.console.note(f"{counts}, so it is not compared with others; the first: {rewards.first_error}")
    score, best = run.files.evaluations.score(evaluation), run.files.evaluations.best_score
    is_best = score is not None and (best is None or score > best)
    if is_best and run.config.run.num_steps:
        keep_best(run, evaluation)
    run.files.evaluations.add(evaluation)
    figures = {f"eval/{name}": getattr(evaluation, name) for name in ("solve_rate", "reward", "seconds")}
    run.tracking.log(run.step, {name: value for name, value in figures.items() if value is not None})
    is_better = is_best and best is not None
    run.console.evaluation(run.step, evaluation.solve_rate, evaluation.seconds, evaluation.reward, is_better)
