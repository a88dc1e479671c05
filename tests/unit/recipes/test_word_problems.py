"""Word problems: the story says what is computed, the solutions are right, and no test problem's
arithmetic is trained on."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from recipes.math.word_problems import TASK, Chain, ChainLimits, draw_chain, solve, tell_story
from tests.golds import STORIES
from tlt.base.types import UserError
from tlt.tasks.base import make_problems

EVERYDAY = ChainLimits({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, max_number=30, max_result=99)
IN_WORDS = {"twice": 2, "doubles": 2, "half": 2}


def chains(num: int, split: Any = "train", difficulty: ChainLimits = EVERYDAY) -> list[Chain]:
    rng = random.Random(split)
    return [draw_chain(rng, split, difficulty) for _ in range(num)]


def test_no_chain_is_in_both_splits() -> None:
    few = ChainLimits({1: 1.0}, max_number=9, max_result=20)  # so few that nearly all are drawn
    train, test = ({str(chain) for chain in chains(4000, split, few)} for split in ("train", "test"))
    assert len(train) > 3 * len(test) > 0
    assert not train & test


def test_every_equation_of_a_worked_solution_holds_and_leads_to_the_answer_within_the_limits() -> None:
    for chain in chains(500):
        worked = solve(chain, is_worked=True)
        equations = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", worked)
        assert len(equations) == len(chain.steps)
        previous = str(chain.start)
        for left, operator, right, result in equations:
            assert left == previous
            assert eval(f"{left}{operator}{right}") == int(result)
            assert 0 < int(result) <= 99
            assert 2 <= int(right) <= 30
            previous = result
        assert TASK.score({"answer": previous}, worked)["solved"]
        assert solve(chain, is_worked=False) == rf"The answer is \boxed{{{previous}}}."


def test_a_story_gives_every_number_once_and_no_other() -> None:
    for chain in chains(1000):
        story = tell_story(chain, random.Random(str(chain)))
        given = [int(number) for number in re.findall(r"\d+", story)]
        given += [value for word, value in IN_WORDS.items() for _ in re.findall(rf"\b{word}\b", story)]
        assert sorted(given) == sorted([chain.start, *(operand for _, operand in chain.steps)]), story


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"steps": {"5": 1}}, "from 1 to 4"),
        ({"steps": {"1": 0}}, "positive weights"),
        ({"max_number": 3}, "at least 4"),
        ({"max_result": 20}, "no smaller than the first"),
        ({"steps": {"1": 1}, "max_number": 4, "max_result": 4, "split": "test"}, "raise the limits"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        make_problems(STORIES, 50, 0, {"split": "train", **options})


@pytest.mark.parametrize(
    ("response", "is_solved"),
    [
        (r"The answer is \boxed{15}.", True),
        (r"\boxed{15.0}", True),
        (r"\boxed{15} no, \boxed{14}", False),
        (r"<think>\boxed{14}</think>\boxed{15}", True),
        (r"<think>\boxed{15}", False),
        ("The answer is 15.", False),
        (r"\boxed{fifteen}", False),
    ],
)
def test_only_the_last_box_after_any_thinking_is_scored(response: str, is_solved: bool) -> None:
    assert TASK.score({"answer": "15"}, response) == {"reward": float(is_solved), "solved": is_solved}
