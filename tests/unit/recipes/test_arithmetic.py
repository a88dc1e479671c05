"""Arithmetic: what is asked is what is scored, problems differ, and no test problem is trained on in
another order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.smollm2.arithmetic import TASK
from tests.golds import SUMS
from tlt.base.types import UserError
from tlt.tasks.base import make_problems


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


def test_problems_differ_and_no_sum_of_the_test_split_is_trained_on_in_any_order() -> None:
    train, test = sums("train", 3000), sums("test", 500, seed=1)
    assert (len(set(train)), len(set(test))) == (3000, 500)
    assert not {tuple(sorted(numbers)) for numbers in train} & {tuple(sorted(numbers)) for numbers in test}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ["/"]}, r"operations is \['/'\]; give some of \+, -, \*, max"),
        ({"digits": 0}, "digits is 0; give a count from 1 to 12"),
        ({"terms": 1}, "terms is 1; give a count from 2 to 32, or"),
        ({"terms": 2.5}, "terms is 2.5"),
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


@pytest.mark.parametrize(
    ("response", "is_solved", "is_solved_with_steps"),
    [
        ("82", True, False),
        ("82 or 83", False, False),
        ("47 + 35 = 82\n#### 82", True, True),
        (r"It is \boxed{82}.", True, True),
        ("#### 82 since 47 + 35 = 82", False, False),
        ("-82", False, False),
        ("<think>83</think>82", True, False),
        ("<think>82", False, False),
    ],
)
def test_the_last_number_is_scored_and_where_steps_are_asked_for_the_marked_one(
    response: str, is_solved: bool, is_solved_with_steps: bool
) -> None:
    for search, expected in (("any", is_solved), ("marked", is_solved_with_steps)):
        found = TASK.score({"answer": "82", "search": search}, response)
        assert found == {"reward": float(expected), "solved": expected}
