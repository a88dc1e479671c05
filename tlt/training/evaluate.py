"""Evaluations on held-out problems: solved with the same noise every time, so that any two can be compared in pairs.

evaluations.jsonl   {"step": updates done, "solve_rate", "seconds", "by_problem": {problem id: share of samples solved},
                     "by_task": {task: share of samples solved}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tlt.files import read_appended, write_jsonl
from tlt.report.console import Gain
from tlt.report.metrics import paired_sign_flip_test
from tlt.rl.rewards import check_scorable, summarize
from tlt.spans import SpanName
from tlt.training.rollout.result import PhaseResult
from tlt.types import Request

if TYPE_CHECKING:
    from tlt.training.run import Run


@dataclass(frozen=True)
class Evaluation:
    """A line of evaluations.jsonl. step: updates done.  by_problem: the share of a problem's scored samples that were solved; a
    problem of which none could be scored is left out.  by_task: the share of scored samples
    that were solved, by the problems' column `task`; empty without."""

    step: int
    solve_rate: float
    seconds: float
    by_problem: dict[str, float]
    by_task: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(step: int, phase: PhaseResult) -> Evaluation:
        """Returns the evaluation that a phase on the held-out problems amounts to."""
        scores: dict[str, list[float]] = {}
        for rollout, reward in zip(phase.rollouts, phase.rewards, strict=True):
            if reward.is_scored:
                scores.setdefault(rollout.problem_id, []).append(float(reward.is_solved))
        by_problem = {problem: sum(values) / len(values) for problem, values in scores.items()}
        by_task = summarize(phase.rewards).solve_rate_by_task
        return Evaluation(step, sum(by_problem.values()) / len(by_problem), phase.seconds, by_problem, by_task)


_EVALUATION = TypeAdapter(Evaluation)


class Evaluations:
    """A run's evaluations so far, the same on every rank; the leader (`writes`) keeps them in a file, and tells the others what
    it has read there (`tell` returns the leader's value on all of them; None: there are no others).

    Opening at `first_step` leaves out what an attempt did that the run has gone back behind, and a line that a kill tore.
    """

    def __init__(self, path: Path, first_step: int, writes: bool, tell: Callable[[Any], Any] | None = None) -> None:
        self.path, self.writes = path, writes
        is_asked = writes or tell is None
        self.all = [one for one in read_evaluations(path) if one.step <= first_step] if is_asked else []
        if tell is not None:
            self.all = [Evaluation(**line) for line in tell([*map(dataclasses.asdict, self.all)])]
        if writes and path.exists():
            write_jsonl(path, map(dataclasses.asdict, self.all))

    def add(self, evaluation: Evaluation) -> None:
        self.all.append(evaluation)
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(evaluation)) + "\n")

    @property
    def best(self) -> float:
        """The highest solve rate; below 0 before the first evaluation."""
        return max((evaluation.solve_rate for evaluation in self.all), default=-1.0)

    @property
    def latest_seconds(self) -> float:
        """Estimates the duration of the next one by the latest."""
        return self.all[-1].seconds if self.all else 0.0

    def progress(self) -> Gain | None:
        """Compares the first evaluation with the last; None: there are no two."""
        if len(self.all) < 2:
            return None
        first, last = self.all[0], self.all[-1]
        problems = sorted(first.by_problem.keys() & last.by_problem.keys())
        p_value = paired_sign_flip_test([first.by_problem[p] for p in problems], [last.by_problem[p] for p in problems])
        return Gain(first.solve_rate, last.solve_rate, p_value)


def read_evaluations(path: Path) -> list[Evaluation]:
    """Returns all whole lines of the file; none where there is no file."""
    return read_appended(path, _EVALUATION.validate_json, "evaluation")


def evaluate(run: Run) -> None:
    """Solves the held-out problems with the policy as it is, unless that has been done; keeps the policy if it is the best."""
    settings = run.config.evaluation
    if not run.held_out or any(evaluation.step == run.step for evaluation in run.evaluations.all):
        return
    params = dataclasses.replace(run.params, temperature=settings.temperature)
    with (
        run.timeline.span(SpanName.EVALUATE),
        run.console.status(f"evaluating on {len(run.held_out)} held-out problems"),
        run.replay.lend("evaluation", 0, run.step),
    ):
        phase = run.phase.run(run.held_out, settings.samples_per_problem, params, "evaluation", 0)
    run.keep_responses("evaluation", phase)
    for rollout in phase.rollouts:  # the next evaluation draws with the same noise
        request = Request(rollout.problem_id, rollout.sample_index, rollout.prompt_ids, params, "evaluation")
        run.references.keep(request.key, rollout.token_ids, rollout.policy_version)
    check_scorable(phase.rewards, run.config.task.name, run.step + 1)
    if (rewards := summarize(phase.rewards)).num_errors:
        counts = f"{rewards.num_errors} of {len(phase.rewards)} responses"
        run.console.note(f"evaluation: {counts} could not be scored and are left out; the first: {rewards.first_error}")
    evaluation = Evaluation.of(run.step, phase)
    if settings.keep_best and evaluation.solve_rate > run.evaluations.best:
        run.save_policy(run.out_dir / "best")
    run.evaluations.add(evaluation)
    run.tracking.log(run.step, {"eval/solve_rate": evaluation.solve_rate, "eval/seconds": evaluation.seconds})
    run.console.evaluation(run.step, evaluation.solve_rate, evaluation.seconds)
