"""Mixtures: exact shares, ids and scores of the parts, and mistakes in one line."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.golds import SUMS
from tests.refused import refused
from tlt.tasks.base import get_task, make_problems, prepare_records
from tlt.tasks.mixture import divide
from tlt.tasks.rewards.pool import RewardPool, summarize
from tlt.tasks.rewards.scoring import RewardSpec

MODULE = """
LOADED = []

class Echo:
    def problems(self, num, seed, split="train", most=10**9):
        return [{"problem_id": f"{split}-{i}", "prompt": "?", "worth": i} for i in range(min(num, most))]

    def warm_up(self, options):
        LOADED.append(dict(options))

    def score(self, problem, text):
        assert set(problem) == {"problem_id", "prompt", "worth"}, problem
        return {"reward": problem["worth"] + 100 * len(LOADED), "solved": problem["problem_id"] == text}

class More(Echo):
    def problems(self, num, seed, split="train"):
        return super().problems(num + 1, seed, split)

    def prepare(self, record, options):
        return record if record["worth"] else None

TASK, MORE = Echo(), More()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "echo_task.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("echo_task", None)


ECHO = {"name": "echo_task:TASK", "weight": 3, "label": "echo"}
COUNTDOWN = {"name": "countdown", "options": {"max_number": 9, "max_target": 20}}


def mix(num: int, *tasks: dict[str, Any], seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    return make_problems("mixture", num, seed, {"split": split, "tasks": list(tasks)})


def test_ids_of_a_part_that_is_a_file_do_not_tell_its_folder() -> None:
    problems = make_problems("mixture", 2, 0, {"split": "train", "tasks": [{"name": SUMS}]})
    assert {problem["task"] for problem in problems} == {"arithmetic.py:TASK"}
    assert problems[0]["problem_id"].startswith("arithmetic.py:TASK/arithmetic-train-0-")
    assert get_task("mixture").score(problems[0], problems[0]["answer"])["solved"]


def test_every_part_has_its_share_all_along_and_the_same_arguments_give_the_same() -> None:
    problems = mix(40, ECHO, COUNTDOWN)
    assert Counter(problem["task"] for problem in problems) == {"echo": 30, "countdown": 10}
    for start in range(0, 40, 4):
        assert Counter(p["task"] for p in problems[start : start + 4]) == {"echo": 3, "countdown": 1}
    assert problems == mix(40, ECHO, COUNTDOWN)
    assert problems != mix(40, ECHO, COUNTDOWN, seed=1)
    assert json.loads(json.dumps(problems)) == problems
    assert {p["problem_id"].partition("/")[0] for p in problems} == {"echo", "countdown"}


@pytest.mark.parametrize(
    ("num", "weights"), [(1, [1, 1, 1]), (7, [1, 1, 1]), (100, [0.5, 0.3, 0.2]), (5, [1e-9, 1]), (3, [2])]
)
def test_shares_sum_to_the_number_and_none_is_off_by_one_whole_problem(
    num: int, weights: list[float]
) -> None:
    quotas = divide(num, weights)
    assert sum(quotas) == num
    shares = [num * weight / sum(weights) for weight in weights]
    assert all(abs(quota - share) < 1 for quota, share in zip(quotas, shares, strict=True))


def test_the_largest_remainders_get_what_is_left() -> None:
    assert [divide(4, [1, 3, 3]), divide(2, [1, 1, 1])] == [[0, 2, 2], [1, 1, 0]]


def test_a_part_scores_its_own_problems_as_it_made_them() -> None:
    echo, countdown = (
        next(p for p in mix(4, ECHO, COUNTDOWN) if p["task"] == t) for t in ("echo", "countdown")
    )
    mixture = get_task("mixture")
    assert mixture.score(echo, "train-0") == {"reward": 0, "solved": True}
    assert mixture.score(countdown, "nonsense")["solved"] is False


def test_the_split_reaches_every_part() -> None:
    train, test = ({p["prompt"] for p in mix(100, COUNTDOWN, split=split)} for split in ("train", "test"))
    assert test
    assert not train & test


def test_workers_have_every_part_ready_before_the_first_score() -> None:
    options = {"tasks": [ECHO, COUNTDOWN]}
    problems = mix(8, ECHO, COUNTDOWN)
    with RewardPool(RewardSpec("mixture", options=options), 1, timeout_seconds=30) as pool:
        for problem in problems:
            pool.submit((problem["problem_id"], 0), problem, "x")
        rewards = pool.drain()
    summary = summarize([rewards[p["problem_id"], 0] for p in problems])
    assert (summary.num_errors, set(summary.reward_by_task)) == (0, {"echo", "countdown"})
    assert summary.reward_by_task["echo"] == 100 + sum(range(6)) / 6


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], r"options.tasks is \[\]; give a list"),
        ([{"weight": 1}], r"options.tasks\[0\] is .*; it must be a table with a name"),
        ([{**ECHO, "wieght": 1}], r"tasks\[0\]: wieght is unknown; known keys are name, weight"),
        ([{**ECHO, "weight": 0}], r"tasks\[0\]: weight is 0; it must be a number greater than 0"),
        ([ECHO, ECHO], "2 parts are called 'echo'; give each a label"),
        ([{"name": "nowhere"}], "unknown task 'nowhere'"),
        ([{**ECHO, "options": {"least": 1}}], "problems.. takes no option 'least'"),
        ([{**ECHO, "options": {"most": 5}}, COUNTDOWN], "echo gives 5 train problems of the 6 that are its"),
        ([{**ECHO, "name": "echo_task:MORE"}], r"problems\(\) returned 9; it must give at most num, 8"),
        ([{"name": "mixture", "options": {"tasks": [ECHO]}}], "problems of mixture have a column 'task'"),
    ],
)
def test_a_mistake_is_one_line(tasks: list[dict[str, Any]], message: str) -> None:
    with refused(message):
        mix(8, *tasks)


def test_a_row_that_its_part_leaves_out_is_left_out() -> None:
    row = {"task": "echo", "scored_by": "echo_task:MORE", "prompt": "?"}
    rows = [(f"f:{n}", {**row, "problem_id": str(n), "worth": n - 1}) for n in (1, 2)]
    assert [place for place, _ in prepare_records("mixture", rows, {})] == ["f:2"]
