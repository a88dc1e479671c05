"""The promises that all tasks keep: how they are found, that problems are a function of seed and options, and
that workers start fast."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.golds import STORIES, SUMS
from tests.refused import refused
from tlt.tasks.base import BUILTIN, get_task, make_problems, prepare_records

DRAWN: dict[str, dict[str, Any]] = {
    "countdown": {"mix": {"2": 1, "3": 1, "4": 1}, "max_number": 12, "max_target": 40},
    SUMS: {"operations": ["+", "-", "*", "max"], "digits": [1, 3], "terms": [2, 4]},
    STORIES: {"steps": {"2": 1, "4": 1}},
    "seeds": {"game": "GuessTheNumber-v0"},
}


@pytest.mark.parametrize("name", DRAWN)
def test_equal_arguments_give_equal_problems_and_more_begin_with_the_same(name: str) -> None:
    def draw(num: int, seed: int) -> list[dict[str, Any]]:
        return make_problems(name, num, seed, {"split": "train", **DRAWN[name]})

    problems = draw(50, 7)
    assert problems[:20] == draw(20, 7)
    assert problems != draw(50, 8)
    assert json.loads(json.dumps(problems)) == problems
    assert len({problem["problem_id"] for problem in problems}) == 50


@pytest.mark.parametrize("name", DRAWN)
def test_an_unknown_split_is_refused(name: str) -> None:
    with refused(r"task [a-z-]+: split 'dev' does not exist; use one of"):
        make_problems(name, 1, 0, {"split": "dev"})


def test_tasks_are_found_by_name_or_path() -> None:
    assert all(get_task(name) is get_task(path) for name, path in BUILTIN.items())
    with pytest.raises(ValueError, match=r"unknown task 'chess'.*countdown.*FILE\.py:object"):
        get_task("chess")
    for name in ("no.such.module:task", "tlt.tasks.countdown:NONE", "tlt.tasks.countdown:MAX_INTERMEDIATE"):
        with pytest.raises(ValueError, match=f"task '{name}'"):
            get_task(name)


def test_reward_workers_import_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from tlt.tasks.base import get_task\n"
        f"for name in {[*BUILTIN, *DRAWN]}: get_task(name)\n"
        "print({'torch', 'transformers', 'sympy', 'math_verify'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


class Halved:
    """Its second problem has a lone surrogate somewhere."""

    name = "halved"

    def __init__(self, change: dict[str, Any]) -> None:
        self.change = change

    def problems(self, num: int, seed: int) -> list[dict[str, Any]]:
        return [{"problem_id": str(n), "prompt": "p", **(self.change if n else {})} for n in range(2)]

    def prepare(self, row: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        return {**row, **self.change}

    def score(self, problem: dict[str, Any], response: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"task": "\ud800"},
        {"problem_id": "a\udfff"},
        {"prompt": "\ud83d!"},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"about": {"\udc00": 1}},
        {"\udc00": 1},
    ],
)
def test_half_a_character_anywhere_in_a_problem_is_refused_in_a_line(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are UTF-8: it would end a run where it is first written."""
    monkeypatch.setattr("tlt.tasks.base.get_task", lambda name: Halved(change))
    with refused("task halved, problem 2: '.*' has half of a character"):
        make_problems("halved", 2, 0, {})
    with refused("rows.jsonl:1: task halved: '.*' has half of a character"):
        prepare_records("halved", [("rows.jsonl:1", {"problem_id": "1", "prompt": "p"})], {})
