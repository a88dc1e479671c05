"""A run's problems: whatever is wrong with a task or a problems file is one line that names it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt.base.config.load import load_config
from tlt.base.types import Problem, UserError
from tlt.tasks.base import get_task, make_problems
from tlt.training.build.problems import describe_overlap, load_problems

BASE = Path(__file__).parents[3] / "recipes" / "countdown" / "base"
SCORE = "    def score(self, problem, text):\n        return {'reward': 1.0, 'solved': True}\nTASK = Mine()\n"


def refusal(action: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        action(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def write_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a task file into the working directory, which is on no path; returns the task's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(text: str) -> str:
        module = f"mine_{abs(hash(text))}"
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:TASK"

    return write


def returning(expression: str) -> str:
    return f"class Mine:\n    def problems(self, num, seed, split='train'):\n        return {expression}\n{SCORE}"


FAULTS = {
    "a syntax error": ("class Mine(:\n", "SyntaxError: .*line 1"),
    "a name error": (f"{returning('[]')}\nundefined\n", "NameError: name 'undefined' is not defined, .*py:8"),
    "a base exception": (
        "raise BaseException('mine')\n",
        r"cannot be imported \(BaseException: mine, .*py:1\)",
    ),
    "a missing module": ("import no_such_module\n", "No module named 'no_such_module'"),
    "a module's __getattr__": (
        "def __getattr__(name):\n    raise KeyError(name)\n",
        r"looked up \(KeyError: 'TASK', .*py:2\)",
    ),
    "a task's __getattr__": (
        f"class Mine:\n    def __getattr__(self, name):\n        raise KeyError(name)\n{SCORE}",
        r"cannot be asked for its methods \(KeyError: '\w+', .*py:3\); correct it",
    ),
    "a __getattr__ beside all methods": (
        returning("[]").replace(
            "class Mine:", "class Mine:\n    def __getattr__(self, name):\n        raise KeyError(name)"
        ),
        r"cannot be asked for its methods \(KeyError: '\w+', .*py:3\); correct it",
    ),
    "no function": (
        f"class Mine:\n    problems = 3\n{SCORE}",
        "problems cannot be called .*; make it a method",
    ),
    "no such object": ("OTHER = 1\n", "has no 'TASK'"),
    "an exception": (
        returning("1 / 0"),
        r"problems\(\) failed \(ZeroDivisionError: division by zero, .*py:3\)",
    ),
    "an exit": (returning("__import__('sys').exit(3)"), r"problems\(\) failed \(SystemExit: 3"),
    "no list": (returning("None"), "returned a NoneType"),
    "an empty list": (returning("[]"), "gave no problems"),
    "no dicts": (returning("['x']"), "problem 1: is a str"),
    "no problem_id": (returning("[{'prompt': 'x'}]"), "problem 1: problem_id is None"),
    "a problem_id twice": (
        returning("[{'problem_id': 'a'}] * 2"),
        "problem 2: problem_id 'a' is that of problem 1",
    ),
    "an unknown option": (
        returning("[]").replace(", split='train'", ""),
        "does not take split, .*write problems",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_task_is_one_line_that_names_it(fault: str, write_task: Any) -> None:
    text, expected = FAULTS[fault]
    name = write_task(text)
    with pytest.raises(UserError, match=expected) as refused:
        make_problems(name, 2, 0, {"split": "train"})
    assert name.partition(":")[0] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_task_that_is_nowhere_says_where_it_was_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(get_task, "elsewhere:TASK")
    assert str(tmp_path) in message
    assert "PYTHONPATH" in message


def problems_from(tmp_path: Path, *lines: Any, per_step: int = 1) -> Any:
    file = tmp_path / "problems.jsonl"
    puzzle = {"numbers": [2, 9, 16], "target": 5}
    file.write_text("".join(json.dumps({**puzzle, **line}) + "\n" for line in lines))
    values = {
        "model": {"path": str(BASE)},
        "task": {"name": "countdown", "data": str(file)},
        "rollout": {"problems_per_step": per_step},
    }
    return load_problems(load_config(values), "train")


UNOPENED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}]
TEXT = {"prompt": "[2,9,16:5]"}


@pytest.mark.parametrize(
    ("lines", "per_step", "told"),
    [
        ([TEXT], 2, "gives 1 problems, .*problems_per_step, which is 2"),
        ([{"prompt": text, "problem_id": "a"} for text in ("[2,9,16:5]", "[2,9:7]")], 1, "problems.jsonl:2"),
        ([{"problem_id": "a"}], 1, "problems.jsonl:1"),
        ([{"messages": [{"role": "user", "content": "2"}]}], 1, "no chat template"),
        ([{"messages": UNOPENED}], 1, "problems.jsonl:1: its last message is empty; .*environment.factory"),
    ],
)
def test_problems_that_no_run_can_take_are_refused(
    lines: list[Any], per_step: int, told: str, tmp_path: Path
) -> None:
    assert re.search(told, refusal(lambda: problems_from(tmp_path, *lines, per_step=per_step)))


def test_held_out_problems_that_are_trained_on_are_told() -> None:
    """An environment begins by its row: there a prompt alone is no problem."""

    def problem(name: str, **columns: Any) -> Problem:
        return Problem(name, (1, 2), {"problem_id": name, **columns})

    train, other, same = problem("a", seed=2), problem("b", seed=3), problem("c", seed=2)
    assert "1 of 1 held-out problems are trained on" in str(describe_overlap([train], [other]))
    assert describe_overlap([train], [other], by_row=True) is None
    assert "('c' is training problem 'a')" in str(describe_overlap([train], [other, same], by_row=True))
    assert describe_overlap([problem("a")], [problem("b")], by_row=True) is None  # named by its id alone
    assert describe_overlap([problem("a")], [problem("a")], by_row=True)
