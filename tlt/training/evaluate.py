"""Evaluations on held-out problems: solved with the same noise every time, so that any two can be compared in pairs.

evaluations.jsonl   {"step": updates done, "solve_rate", "seconds", "by_problem": {problem id: share of samples solved},
                     "by_task": {task: share of samples solved}, "reward", "reward_by_problem", "num_unscored"}
best/               the policy of the best evaluation; which one that is stands in its config.json, under tlt_evaluation

An evaluation is judged by its score: the solve rate, or the mean reward where reward functions alone score. One in which
responses have no score is incomplete: it is written down, is not judged, and is done again by a resumed run that begins there.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tlt.distributed.world import tell
from tlt.files import dumps, read_appended, read_file, write_jsonl
from tlt.report.console import near, when
from tlt.report.metrics import paired_sign_flip_test
from tlt.report.outcome import Gain
from tlt.rl.rewards import RewardSummary, check_scorable, summarize
from tlt.rl.scoring import OWN_SCORE
from tlt.spans import SpanName
from tlt.training.rollout.result import PhaseResult
from tlt.types import Request, Reward

if TYPE_CHECKING:
    from tlt.training.run import Run

MARK = "tlt_evaluation"


@dataclass(frozen=True)
class Evaluation:
    """A line of evaluations.jsonl. step: updates done.  solve_rate, reward: means over the problems; None: nothing was scored,
    or the line is an older TLT's, which wrote no rewards.
    by_problem, reward_by_problem: the share of a problem's scored samples that were solved, and their mean reward; a problem of
    which none could be scored is left out.
    by_task: the share of scored samples that were solved, by the problems' column `task`; empty without.
    num_unscored: responses without a score.
    """

    step: int
    solve_rate: float | None
    seconds: float
    by_problem: dict[str, float]
    by_task: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    reward_by_problem: dict[str, float] = field(default_factory=dict)
    num_unscored: int = 0

    @staticmethod
    def of(step: int, phase: PhaseResult) -> Evaluation:
        """Returns the evaluation that a phase on the held-out problems amounts to."""
        scored: dict[str, list[Reward]] = {}
        for rollout, reward in zip(phase.rollouts, phase.rewards, strict=True):
            if reward.is_scored:
                scored.setdefault(rollout.problem_id, []).append(reward)
        solved = {problem: _mean([float(one.is_solved) for one in rewards]) for problem, rewards in scored.items()}
        rewards = {problem: _mean([one.value for one in rewards]) for problem, rewards in scored.items()}
        summary = summarize(phase.rewards)
        return Evaluation(
            step,
            _mean(solved.values()) if solved else None,
            phase.seconds,
            solved,
            summary.solve_rate_by_task,
            _mean(rewards.values()) if rewards else None,
            rewards,
            summary.num_errors,
        )

    def score(self, by_reward: bool) -> float | None:
        """Returns what it is judged by; None: it is not judged."""
        return None if self.num_unscored else self.reward if by_reward else self.solve_rate


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


_EVALUATION = TypeAdapter(Evaluation)


def is_judged_by_reward(functions: Sequence[str]) -> bool:
    """Returns whether the mean reward is the score: where the task's own score is not among the reward functions, nothing but
    rewards.solved_at says what is solved, and no response may ever come so far."""
    return bool(functions) and OWN_SCORE not in functions


class Evaluations:
    """A run's evaluations so far, the same on every rank; the leader (`writes`) keeps them in a file, and tells the others what
    it has read there (`tell` returns the leader's value on all of them; None: there are no others).

    Opening at `first_step` leaves out what an attempt did that the run has gone back behind, and a line that a kill tore.
    by_reward: see `is_judged_by_reward`.
    """

    def __init__(
        self,
        path: Path,
        first_step: int,
        writes: bool,
        tell: Callable[[Any], Any] | None = None,
        by_reward: bool = False,
    ) -> None:
        self.path, self.writes, self.by_reward = path, writes, by_reward
        is_asked = writes or tell is None
        self.all = [one for one in read_evaluations(path) if one.step <= first_step] if is_asked else []
        if tell is not None:
            self.all = [Evaluation(**line) for line in tell([*map(dataclasses.asdict, self.all)])]
        if writes and path.exists():
            self._rewrite()

    def add(self, evaluation: Evaluation) -> None:
        """Appends it, or puts it in the place of one of the same step."""
        is_again = evaluation.step in (one.step for one in self.all)
        self.all = [*(one for one in self.all if one.step != evaluation.step), evaluation]
        if self.writes and is_again:
            self._rewrite()
        elif self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(dumps(dataclasses.asdict(evaluation)) + "\n")

    def _rewrite(self) -> None:
        write_jsonl(self.path, map(dataclasses.asdict, self.all))

    def score(self, evaluation: Evaluation) -> float | None:
        """Returns what the evaluation is judged by; None: it is not judged."""
        return evaluation.score(self.by_reward)

    @property
    def complete(self) -> list[Evaluation]:
        """Returns those that are judged."""
        return [evaluation for evaluation in self.all if self.score(evaluation) is not None]

    def is_done(self, step: int) -> bool:
        return any(evaluation.step == step for evaluation in self.complete)

    @property
    def best_score(self) -> float | None:
        """Returns the highest score; None: there is none."""
        return max((score for one in self.all if (score := self.score(one)) is not None), default=None)

    @property
    def best(self) -> Evaluation | None:
        """Returns the first one with the highest score; None: there is none."""
        return next((one for one in self.complete if self.score(one) == self.best_score), None)

    @property
    def latest_seconds(self) -> float:
        """Estimates the duration of the next one by the latest."""
        return self.all[-1].seconds if self.all else 0.0

    def progress(self) -> Gain | None:
        """Compares the last complete evaluation with the first one of the same problems; None: there are no two."""
        if not self.complete:
            return None
        last = self.complete[-1]
        first = next(one for one in self.complete if one.by_problem.keys() == last.by_problem.keys())
        if first is last:
            return None
        solved = _pair(first.by_problem, last.by_problem)
        rewards = _pair(first.reward_by_problem, last.reward_by_problem) if self.by_reward else None
        return Gain(
            (first.step, last.step),
            (_mean(solved[0]), _mean(solved[1])),
            None if rewards is None else (_mean(rewards[0]), _mean(rewards[1])),
            paired_sign_flip_test(*(rewards or solved)),
        )

    def left_out(self) -> list[str]:
        """Says of the first and of the last evaluation why `progress` leaves it out, where it does."""
        ends = {one.step: one for one in (*self.all[:1], *self.all[-1:]) if self.score(one) is None}
        return [f"the evaluation {when(step)} is left out: {_why_not(one)}" for step, one in ends.items()]


def _pair(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Returns the figures of the same problems, in the same order."""
    problems = sorted(before)
    return [before[problem] for problem in problems], [after[problem] for problem in problems]


def _why_not(evaluation: Evaluation) -> str:
    if evaluation.num_unscored:
        return f"{evaluation.num_unscored} of its responses have no score"
    return "an older TLT wrote no rewards"


def read_evaluations(path: Path) -> list[Evaluation]:
    """Returns all whole lines of the file; none where there is no file."""
    return read_appended(path, _EVALUATION.validate_json, "evaluation")


# ── best/ ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def keep_best(run: Run, evaluation: Evaluation) -> None:
    """Writes best/, with a mark that says which evaluation it is of."""
    mark = {"step": evaluation.step, "solve_rate": evaluation.solve_rate, "reward": evaluation.reward}
    run.save_policy(run.out_dir / "best", {MARK: mark})


def settle_best(run: Run) -> None:
    """Sees to it that best/ is of the best evaluation that the run has. What lies there may be of one that the run has gone
    back behind; then the best policy is written again, if it is the one at hand, or nothing stays."""
    folder, best = run.out_dir / "best", run.evaluations.best
    held = tell(run.world, read_mark(folder) if run.world.is_leader else None)
    if held is None or (best is not None and best.step == held):
        return
    gone = f"{near(folder)}: was of the evaluation {when(held)}, which the run has gone back behind"
    if best is not None and best.step == run.step:
        keep_best(run, best)
        run.console.note(f"{gone}; now it is of the one {when(best.step)}")
        return
    if run.world.is_leader:
        shutil.rmtree(folder.resolve())
    lost = "" if best is None else f", and the best policy left, that {when(best.step)}, had been replaced by it"
    run.console.note(f"{gone}{lost}; it is removed until an evaluation is better")


def read_mark(folder: Path) -> int | None:
    """Returns after how many updates best/ was evaluated; None: there is none, or none that says so, such as an older TLT's."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(read_file(folder / "config.json"))[MARK]["step"])
    return None


# ── evaluating ───────────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate(run: Run) -> None:
    """Solves the held-out problems with the policy as it is, unless that has been done; keeps the policy if it is the best."""
    settings = run.config.evaluation
    if not run.held_out or run.evaluations.is_done(run.step):
        return
    params = dataclasses.replace(run.params, temperature=settings.temperature)
    with (
        run.timeline.span(SpanName.EVALUATE),
        run.console.status(f"evaluating on {len(run.held_out)} held-out problems"),
        run.replay.lend("evaluation", 0, run.step),
    ):
        run.drafter.foresee(problem.prompt_ids for problem in run.held_out)
        phase = run.phase.run(run.held_out, settings.samples_per_problem, params, "evaluation", 0)
    run.keep_responses("evaluation", phase)
    for rollout in phase.rollouts:  # the next evaluation draws with the same noise
        request = Request(rollout.problem_id, rollout.sample_index, rollout.prompt_ids, params, "evaluation")
        run.references.keep(request.key, rollout.token_ids, rollout.policy_version)
    if run.step == 0:  # nothing is lost yet; later the run is worth more than an evaluation
        check_scorable(phase.rewards, run.config.task.name, "the evaluation before training")
    report(run, Evaluation.of(run.step, phase), summarize(phase.rewards))


def report(run: Run, evaluation: Evaluation, rewards: RewardSummary) -> None:
    """Writes down and prints what an evaluation has found, and keeps the policy if it is the best."""
    if rewards.num_errors:
        counts = f"evaluation {when(run.step)}: {rewards.num_errors} responses could not be scored"
        run.console.note(f"{counts}, so it is not compared with others; the first: {rewards.first_error}")
    score, best = run.evaluations.score(evaluation), run.evaluations.best_score
    is_best = score is not None and (best is None or score > best)
    if is_best and run.config.evaluation.keep_best and run.config.run.num_steps:
        keep_best(run, evaluation)
    run.evaluations.add(evaluation)
    figures: Mapping[str, float | None] = {name: getattr(evaluation, name) for name in ("solve_rate", "reward", "seconds")}
    run.tracking.log(run.step, {f"eval/{name}": value for name, value in figures.items() if value is not None})
    reward = evaluation.reward if run.evaluations.by_reward else None
    run.console.evaluation(run.step, evaluation.solve_rate, evaluation.seconds, reward, is_best and best is not None)
