"""Evaluations of a run: what their file keeps of a run that was killed, or that went back; and whether
training helped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.training.saved.evaluations import Evaluation, Evaluations, is_judged_by_reward, read_evaluations


def make_evaluation(step: int, *shares: float, num_unscored: int = 0) -> Evaluation:
    """Each problem's reward is 10 less its share of solved samples."""
    by_problem = {f"p{index}": share for index, share in enumerate(shares)}
    rewards = {problem: 10 - share for problem, share in by_problem.items()}
    solve_rate = sum(shares) / len(shares) if shares else None
    reward = sum(rewards.values()) / len(rewards) if rewards else None
    return Evaluation(step, solve_rate, 2.5, by_problem, {}, reward, rewards, num_unscored)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "evaluations.jsonl"
    evaluations = Evaluations(path, 0, writes=True)
    for step, *shares in ((0, 0.0, 0.5), (10, 1.0, 0.5), (20, 1.0, 1.0)):
        evaluations.add(make_evaluation(step, *shares))
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


def test_progress_compares_the_first_with_the_last_and_needs_two(tmp_path: Path, path: Path) -> None:
    progress = Evaluations(path, 20, writes=False).progress()
    assert progress is not None
    assert (progress.steps, progress.solve_rates) == ((0, 20), (0.25, 1.0))
    assert (progress.rewards, progress.by_reward) == ((9.75, 9.0), False), "they stand beside"
    assert progress.p_value == 0.25, "one of four patterns of signs"
    assert Evaluations(path, 5, writes=False).progress() is None
    assert Evaluations(tmp_path / "none", 5, writes=False).best is None


def test_an_incomplete_evaluation_is_neither_the_best_nor_compared_and_the_next_one_takes_its_place(
    path: Path,
) -> None:
    evaluations = Evaluations(path, 20, writes=True)
    evaluations.add(make_evaluation(30, 1.0, num_unscored=1))
    evaluations.add(make_evaluation(40, num_unscored=2))
    assert evaluations.all == read_evaluations(path)
    assert (evaluations.is_done(20), evaluations.is_done(30)) == (True, False)
    assert evaluations.best == make_evaluation(20, 1.0, 1.0)
    progress = evaluations.progress()
    assert progress is not None
    assert progress.steps == (0, 20)
    assert evaluations.left_out() == [
        "the evaluation after 40 updates is left out: 2 of its responses have no score"
    ]
    evaluations.add(make_evaluation(40, 0.5, 1.0))
    assert (evaluations.left_out(), evaluations.all) == ([], read_evaluations(path))
    assert [evaluation.step for evaluation in evaluations.all] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(
    ("functions", "is_by_reward"),
    [((), False), (("task",), False), (("m:f", "task"), False), (("m:f", "m:g"), True)],
)
def test_the_reward_is_the_score_where_functions_alone_score(
    functions: tuple[str, ...], is_by_reward: bool
) -> None:
    assert is_judged_by_reward(functions) == is_by_reward


def test_the_means_and_the_p_value_of_progress_are_over_the_same_problems(tmp_path: Path) -> None:
    evaluations = Evaluations(tmp_path / "evaluations.jsonl", 0, writes=False)
    for step, shares in enumerate(({"a": 1.0, "b": 0.5}, {"b": 0.5, "c": 0.5}, {"b": 1.0, "c": 0.5})):
        assert evaluations.progress() is None
        rate = sum(shares.values()) / 2
        evaluations.add(Evaluation(step, rate, 1.0, shares, {}, rate, shares, 0))
    progress = evaluations.progress()
    assert progress is not None
    assert (progress.steps, progress.solve_rates, progress.p_value) == ((1, 2), (0.5, 0.75), 0.5)
