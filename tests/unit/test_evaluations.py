"""Evaluations of a run: what their file keeps of a run that was killed, or that went back; and whether training helped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.accounts import DrafterReport
from tlt.engine.stats import EngineStats
from tlt.training.evaluate import Evaluation, Evaluations, read_evaluations
from tlt.training.rollout.result import PhaseResult, ReplicaReport
from tlt.types import Reward, Rollout, UserError


def make_evaluation(step: int, *shares: float) -> Evaluation:
    by_problem = {f"p{index}": share for index, share in enumerate(shares)}
    return Evaluation(step, sum(shares) / len(shares), 2.5, by_problem)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "evaluations.jsonl"
    evaluations = Evaluations(path, 0, writes=True)
    for evaluation in (make_evaluation(0, 0.0, 0.5), make_evaluation(10, 1.0, 0.5), make_evaluation(20, 1.0, 1.0)):
        evaluations.add(evaluation)
    return path


def test_a_line_that_a_kill_tore_is_dropped_and_what_follows_stands_on_lines_of_its_own(path: Path) -> None:
    whole = path.read_text()
    path.write_text(whole + '{"step": 30, "solve_ra')
    evaluations = Evaluations(path, 30, writes=True)
    assert path.read_text() == whole
    evaluations.add(make_evaluation(30, 1.0, 1.0))
    assert [evaluation.step for evaluation in read_evaluations(path)] == [0, 10, 20, 30]
    assert evaluations.all == read_evaluations(path)


def test_a_run_that_goes_back_forgets_the_evaluations_it_went_back_behind(path: Path) -> None:
    assert [evaluation.step for evaluation in Evaluations(path, 15, writes=True).all] == [0, 10]
    assert [evaluation.step for evaluation in read_evaluations(path)] == [0, 10]


def test_only_the_leader_writes(path: Path) -> None:
    before = path.read_text()
    evaluations = Evaluations(path, 10, writes=False)
    evaluations.add(make_evaluation(12, 1.0, 1.0))
    assert [evaluation.step for evaluation in evaluations.all] == [0, 10, 12]
    assert path.read_text() == before


def test_a_line_that_is_no_evaluation_is_named(path: Path) -> None:
    path.write_text(path.read_text() + '{"step": 30}\n')
    with pytest.raises(UserError, match="line 4: no evaluation"):
        Evaluations(path, 30, writes=True)


def test_progress_compares_the_first_with_the_last_and_needs_two(tmp_path: Path, path: Path) -> None:
    progress = Evaluations(path, 20, writes=False).progress()
    assert progress is not None
    assert (progress.before, progress.after) == (0.25, 1.0)
    assert progress.p_value == 0.25, "one of four patterns of signs"
    assert Evaluations(path, 5, writes=False).progress() is None
    assert Evaluations(tmp_path / "none", 5, writes=False).best < 0


def make_phase_result(rewards: list[Reward]) -> PhaseResult:
    """Two samples of each problem."""
    rollouts = [Rollout(f"p{i // 2}", i % 2, (1,), (2,), (-0.1,), "stop", 0) for i in range(len(rewards))]
    replica = ReplicaReport(0.0, 1.0, 2.0, EngineStats(), DrafterReport())
    return PhaseResult(rollouts, rewards, [replica])


def test_a_response_that_could_not_be_scored_is_left_out_and_not_counted_as_unsolved() -> None:
    solved, failed = Reward(1.0, True), Reward(0.0, False, "KeyError: 'target'")
    evaluation = Evaluation.of(3, make_phase_result([solved, failed, solved, Reward(0.0, False), failed, failed]))
    assert evaluation.by_problem == {"p0": 1.0, "p1": 0.5}, "of the third problem nothing is known"
    assert evaluation.solve_rate == 0.75


def test_progress_pairs_the_problems_that_both_evaluations_know(tmp_path: Path) -> None:
    evaluations = Evaluations(tmp_path / "evaluations.jsonl", 0, writes=False)
    evaluations.add(Evaluation(0, 0.0, 1.0, {"a": 0.0, "b": 0.0}))
    evaluations.add(Evaluation(1, 1.0, 1.0, {"b": 1.0, "c": 1.0}))
    progress = evaluations.progress()
    assert progress is not None
    assert (progress.before, progress.after) == (0.0, 1.0)
