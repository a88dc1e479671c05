"""Rows of data whose answer cannot be read are refused with their place, before anything is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golds import SUMS
from tests.refused import refused
from tlt.apps.cli.main import main
from tlt.tasks.base import get_task, prepare_records

UNREADABLE: tuple[Any, ...] = (
    "12 apples",
    "no idea",
    "",
    "#### 12",
    "1,2",
    "1e99999",
    None,
    True,
    [12],
    {},
    float("nan"),
)
NUMBERS = {
    12: "12",
    12.5: "25/2",
    -3: "-3",
    1e-05: "0.00001",
    0.1 + 0.2: "0.3",
    "1,234": "1234",
    "3/4": "0.75",
}


@pytest.mark.parametrize("gold", UNREADABLE, ids=repr)
def test_a_gold_that_is_no_number_is_refused_with_its_row(gold: Any) -> None:
    rows = [("f:1", {"prompt": "?", "answer": "12"}), ("f:2", {"prompt": "?", "answer": gold})]
    with refused(r"^f:2: task arithmetic: answer is .*give a number such as 12"):
        prepare_records(SUMS, rows, {})


@pytest.mark.parametrize(
    ("task", "row", "told"),
    [
        (SUMS, {"prompt": "?"}, "no answer among the columns"),
        (SUMS, {"answer": "1", "search": "last"}, "search is 'last'; use one of"),
        (SUMS, {"answer": "1", "thinking_ends": 3}, "thinking_ends is 3; give the tag"),
        ("countdown", {"prompt": "?", "answer": "1"}, "numbers is None and target None; give numbers"),
        ("countdown", {"numbers": [1, "2"], "target": 3}, "numbers is .* and target 3; give numbers"),
        ("mixture", {"prompt": "?", "answer": "1"}, "has no task and scored_by"),
        ("mixture", {"task": "t", "scored_by": SUMS, "answer": "x"}, "answer is 'x'"),
    ],
)
def test_a_row_that_its_task_cannot_score_is_refused(task: str, row: dict[str, Any], told: str) -> None:
    with refused(f"^f:1: task .*{told}"):
        prepare_records(task, [("f:1", row)], {})


@pytest.mark.parametrize("task", [SUMS, "math"])
@pytest.mark.parametrize("gold", NUMBERS, ids=repr)
def test_a_gold_that_is_a_number_of_json_is_met_by_that_number_alone(task: str, gold: Any) -> None:
    if task == "math":
        pytest.importorskip("math_verify")
    ((_, problem),) = prepare_records(task, [("f:1", {"prompt": "?", "answer": gold})], {})
    scores = [
        get_task(task).score(problem, rf"\boxed{{{answer}}}") for answer in (NUMBERS[gold], "no idea", "7")
    ]
    assert [score["solved"] for score in scores] == [True, False, False]


def test_an_unreadable_gold_that_is_scored_all_the_same_is_an_error_and_no_reward() -> None:
    with refused("answer is '12 apples', which is no plain number"):
        get_task(SUMS).score({"answer": "12 apples"}, r"\boxed{no idea}")


def test_tlt_score_refuses_an_unreadable_gold_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, responses = tmp_path / "problems.jsonl", tmp_path / "responses.jsonl"
    rows = [{"problem_id": "a", "prompt": "?", "answer": "12"}, {"problem_id": "b", "answer": "12 apples"}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses.write_text(json.dumps({"problem_id": "b", "text": r"\boxed{no idea}"}) + "\n")
    assert main(["score", SUMS, "--problems", str(problems), "--responses", str(responses)]) == 2
    assert "problems.jsonl:2: task arithmetic: answer is '12 apples'" in capsys.readouterr().err
