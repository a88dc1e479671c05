"""A run's evaluations: evaluations.jsonl, the best evaluation, and the gain from the first to the last.

An evaluation with an unscored response is incomplete: written, not judged, and repeated by a resumed run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tlt.base.io.files import dumps, parse_json, read_appended, refuse_endless, write_jsonl
from tlt.base.types import Reward
from tlt.base.value_types import describe_mistakes
from tlt.tasks.rewards.pool import summarize
from tlt.tasks.rewards.scoring import OWN_SCORE
from tlt.training.report.outcome import Gain
from tlt.training.report.paired_test import paired_sign_flip_test
from tlt.training.report.words import when
from tlt.training.rollout.result import PhaseResult


@dataclass(frozen=True)
class Evaluation:
    """A line of evaluations.jsonl.

    step: updates done.
    solve_rate: mean over the problems of their solved share; None: nothing was scored.
    reward: mean over the problems of their mean reward; None: nothing was scored.
    seconds: duration of the evaluation.
    by_problem: solved share of each problem's scored samples; problems without any are left out.
    reward_by_problem: mean reward of the same samples.
    by_task: solved share of the scored samples, by the problems' column `task`; empty without it.
    num_unscored: responses without a score.
    """

    step: int
    solve_rate: float | None
    seconds: float
    by_problem: dict[str, float]
    by_task: dict[str, float]
    reward: float | None
    reward_by_problem: dict[str, float]
    num_unscored: int

    @staticmethod
    def of(step: int, phase: PhaseResult) -> Evaluation:
        scored: dict[str, list[Reward]] = {}
        for rollout, reward in zip(phase.rollouts, phase.rewards, strict=True):
            if reward.is_scored:
                scored.setdefault(rollout.problem_id, []).append(reward)
        solved = {problem: _mean([one.is_solved for one in rewards]) for problem, rewards in scored.items()}
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


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


_EVALUATION = TypeAdapter(Evaluation)


def is_judged_by_reward(functions: Sequence[str]) -> bool:
    """Without the task's own score, rewards.solved_at alone defines "solved", and nothing may reach it."""
    return bool(functions) and OWN_SCORE not in functions


class Evaluations:
    """The same on every rank; the leader writes them.

    first_step: later evaluations are dropped: the run has resumed from before them.
    broadcast: sends the leader's value to all ranks; None: a single rank.
    """

    def __init__(
        self,
        path: Path,
        first_step: int,
        writes: bool,
        broadcast: Callable[[Any], Any] | None = None,
        by_reward: bool = False,
    ) -> None:
        self.path, self.writes, self.by_reward = path, writes, by_reward
        is_asked = writes or broadcast is None
        self.all = [one for one in read_evaluations(path) if one.step <= first_step] if is_asked else []
        if broadcast is not None:
            self.all = [Evaluation(**line) for line in broadcast([*map(dataclasses.asdict, self.all)])]
        if writes and path.exists():
            self._rewrite()

    def add(self, evaluation: Evaluation) -> None:
        """Replaces an evaluation of the same step."""
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
        """None: the evaluation is incomplete."""
        judged = evaluation.reward if self.by_reward else evaluation.solve_rate
        return None if evaluation.num_unscored else judged

    @property
    def complete(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.all if self.score(evaluation) is not None]

    def is_done(self, step: int) -> bool:
        return any(evaluation.step == step for evaluation in self.complete)

    @property
    def best_score(self) -> float | None:
        return max((score for one in self.all if (score := self.score(one)) is not None), default=None)

    @property
    def best(self) -> Evaluation | None:
        return next((one for one in self.complete if self.score(one) == self.best_score), None)

    @property
    def latest_seconds(self) -> float:
        return self.all[-1].seconds if self.all else 0.0

    def progress(self) -> Gain | None:
        """Between the first and the last complete evaluation of the same problems; None: fewer than two."""
        if not self.complete:
            return None
        last = self.complete[-1]
        first = next(one for one in self.complete if one.by_problem.keys() == last.by_problem.keys())
        if first is last or not last.by_problem:
            return None
        solved = _pair(first.by_problem, last.by_problem)
        rewards = _pair(first.reward_by_problem, last.reward_by_problem)
        return Gain(
            (first.step, last.step),
            (_mean(solved[0]), _mean(solved[1])),
            (_mean(rewards[0]), _mean(rewards[1])),
            paired_sign_flip_test(*(rewards if self.by_reward else solved)),
            self.by_reward,
        )

    def left_out(self) -> list[str]:
        ends = {one.step: one for one in (*self.all[:1], *self.all[-1:]) if self.score(one) is None}
        return [
            f"the evaluation {when(step)} is left out: {one.num_unscored} of its responses have no score"
            for step, one in ends.items()
        ]


def _pair(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[list[float], list[float]]:
    problems = sorted(before)
    return [before[problem] for problem in problems], [after[problem] for problem in problems]


def read_evaluations(path: Path) -> list[Evaluation]:
    return read_appended(path, parse_evaluation, "evaluation")


def parse_evaluation(line: str) -> Evaluation:
    """Raises ValueError."""
    values = parse_json(line)
    refuse_endless(values)
    try:
        found = _EVALUATION.validate_python(values)
    except ValidationError as error:
        raise ValueError(describe_mistakes(error)) from None
    if found.by_problem.keys() != found.reward_by_problem.keys():
        raise ValueError("by_problem and reward_by_problem are not of the same problems")
    return found
