"""Arithmetic: what is asked is what is scored, problems differ, and no test problem is trained on in
another order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.smollm2.arithmetic import CHECKED, TASK, WITH_STEPS, Question
from tests.golds import SUMS
from tlt.base.types import UserError
from tlt.tasks.base import make_problems

MIXED = {"operations": ["+", "-", "*", "max"], "digits": [1, 3], "terms": [2, 4]}


def text(problem: dict[str, Any]) -> str:
    return str(problem["messages"][0]["content"])


def sums(split: str, num: int, seed: int = 0, **options: Any) -> list[tuple[int, ...]]:
    problems = TASK.problems(num, seed, split=split, **options)
    return [tuple(map(int, re.findall(r"\d+", text(problem)))) for problem in problems]


def test_two_digit_additions_are_asked_as_a_chat_message() -> None:
    problem = TASK.problems(1, 0)[0]
    (first, second), answer = sums("train", 1)[0], int(problem["answer"])
    asked = f"What is {first} + {second}? Reply with the number only."
    assert problem["messages"] == [{"role": "user", "content": asked}]
    assert (10 <= first <= 99, 10 <= second <= 99, first + second) == (True, True, answer)


def test_the_answer_is_that_of_the_question_that_is_read() -> None:
    seen = set()
    for problem in TASK.problems(400, 0, **MIXED):
        question, instruction = text(problem).split("? ", 1)
        assert instruction == "Reply with the number only."
        largest = re.fullmatch(r"Which is the largest of (.*) and (\d+)", question)
        if largest is not None:
            expected = max(map(int, [*largest[1].split(", "), largest[2]]))
            seen.add("max")
        else:
            expression = question.removeprefix("What is ")
            expected = eval(expression)
            seen.update(set(expression) & set("+-*"))
        assert problem["answer"] == str(expected)
    assert seen == {"+", "-", "*", "max"}


def test_problems_differ_and_no_sum_of_the_test_split_is_trained_on_in_any_order() -> None:
    train, test = sums("train", 3000), sums("test", 500, seed=1)
    assert (len(set(train)), len(set(test))) == (3000, 500)
    assert not {tuple(sorted(numbers)) for numbers in train} & {tuple(sorted(numbers)) for numbers in test}


def test_the_order_of_a_difference_counts_for_its_split_where_that_of_a_sum_does_not() -> None:
    pairs = [(a, b) for a in range(10, 40) for b in range(10, 40)]
    for operation, is_symmetric in (("+", True), ("*", True), ("max", True), ("-", False)):
        same = [Question(operation, (a, b)).split == Question(operation, (b, a)).split for a, b in pairs]
        assert all(same) is is_symmetric
    assert Question("-", (90, 20, 30)).split == Question("-", (90, 30, 20)).split


def test_options_bound_what_is_drawn() -> None:
    drawn = sums("train", 300, digits=[1, 3], terms=[2, 4])
    assert {len(numbers) for numbers in drawn} == {2, 3, 4}
    assert {len(str(number)) for numbers in drawn for number in numbers} == {1, 2, 3}
    assert {number for numbers in sums("train", 60, digits=1) for number in numbers} == set(range(1, 10))
    assert text(TASK.problems(1, 0, instruction="")[0]).endswith("?")
    asked = {steps: TASK.problems(1, 0, steps=steps)[0] for steps in (True, "checked", False)}
    assert text(asked[True]).endswith(f"? {WITH_STEPS}")
    assert text(asked["checked"]).endswith(f"? {CHECKED}")
    assert [problem["search"] for problem in asked.values()] == ["marked", "marked", "any"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ["/"]}, r"operations is \['/'\]; give some of \+, -, \*, max"),
        ({"operations": []}, "operations is"),
        ({"digits": 0}, "digits is 0; give a count from 1 to 12"),
        ({"digits": [3, 1]}, r"digits is \[3, 1\]"),
        ({"terms": 1}, "terms is 1; give a count from 2 to 32, or"),
        ({"terms": [2, 3, 4]}, "terms is"),
        ({"terms": True}, "terms is True"),
        ({"terms": 2.5}, "terms is 2.5"),
        ({"terms": "23"}, "terms is '23'"),
        ({"steps": "twice"}, "steps is 'twice'; give true, false or \"checked\""),
        (
            {"digits": 1, "split": "test"},
            "about 13 different test problems of the 100 asked for; ask for fewer",
        ),
        ({"carry": True}, "takes no option 'carry'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_problems(SUMS, 100, 0, {"split": "train", **options})


def test_all_the_problems_there_are_can_be_asked_for() -> None:
    drawn = {*sums("train", 68, digits=1), *sums("test", 13, digits=1)}
    assert drawn == {(a, b) for a in range(1, 10) for b in range(1, 10)}


@pytest.mark.parametrize(
    ("response", "is_solved", "is_solved_with_steps"),
    [
        ("82", True, False),
        ("47 + 35 = 82.", True, False),
        ("82 or 83", False, False),
        ("47 + 35 = 82\n#### 82", True, True),
        (r"It is \boxed{82}.", True, True),
        ("Answer: 82", True, True),
        ("#### 82 since 47 + 35 = 82", False, False),
        ("820", False, False),
        ("-82", False, False),
        ("<think>83</think>82", True, False),
        ("<think>82", False, False),
        ("eighty-two", False, False),
    ],
)
def test_the_last_number_is_scored_and_where_steps_are_asked_for_the_marked_one(
    response: str, is_solved: bool, is_solved_with_steps: bool
) -> None:
    for search, expected in (("any", is_solved), ("marked", is_solved_with_steps)):
        found = TASK.score({"answer": "82", "search": search}, response)
        assert found == {"reward": float(expected), "solved": expected}
