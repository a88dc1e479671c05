"""Reward functions in TRL's signature: called as TRL calls them, weighted, and None, errors and coroutines
as documented."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tlt.base.types import Reward
from tlt.tasks.rewards.pool import RewardPool, summarize
from tlt.tasks.rewards.scoring import Completion, RewardSpec, Scorer

FUNCTIONS = '''
import asyncio, json, sys

def exact(completions, answer, **kwargs):
    return [1.0 if text == right else 0.0 for text, right in zip(completions, answer, strict=True)]

def length_penalty(prompts, completions, completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]

def where_it_applies(completions, kind, **kwargs):
    return [1.0 if k == "code" else None for k in kind]

def saw(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    log_metric("words", len(completions))
    log_extra("text", completions)
    seen = {"prompts": prompts, "completions": completions, "ids": completion_ids}
    seen["step"] = trainer_state.global_step
    raise RuntimeError(json.dumps({**seen, "columns": columns}))

def without_kwargs(completions):
    return [2.0]

def logs(completions, log_metric, **kwargs):
    for text in completions:
        log_metric("shout", float(text.isupper()))
    return [1.0 for _ in completions]

meeting = None

async def first_of_two(completions, **kwargs):
    """Can only end while the other one runs, in the same loop."""
    global meeting
    meeting = asyncio.Event()
    await asyncio.wait_for(meeting.wait(), 10)
    return [1.0]

async def second_of_two(completions, **kwargs):
    while meeting is None:
        await asyncio.sleep(0)
    meeting.set()
    return [10.0]

lock = None

async def keeps_a_client(completions, **kwargs):
    global lock
    loop = asyncio.get_running_loop()
    lock = lock or (loop, asyncio.Lock())
    async with lock[1]:
        return [1.0 if lock[0] is loop else 0.0]

async def async_fails(completions, **kwargs):
    raise KeyError("judge")

async def async_exits(completions, **kwargs):
    sys.exit(3)

def calls_run(completions, **kwargs):
    """A coroutine of its own, run as scripts run them."""
    async def judge():
        return [0.25]
    return asyncio.run(judge())

def says(completions, **kwargs):
    return eval(completions[0])

class Judge:
    def __call__(self, completions, **kwargs):
        return [0.5]

judge = Judge()
not_a_function = 3

class Task:
    def problems(self, num, seed, **options):
        return []

    def score(self, problem, text):
        return {"reward": 0.5, "solved": text == "42"}

TASK = Task()

class Awkward:
    """A tensor of two numbers, say, or a lazy value."""
    def __bool__(self):
        raise RuntimeError("awkward")
    __float__ = __bool__

class AwkwardTask(Task):
    def score(self, problem, text):
        return {"reward": 1.0, "solved": Awkward()}

AWKWARD = AwkwardTask()

def logs_half_a_character(completions, log_metric, **kwargs):
    log_metric("\\ud800", 1.0)
    return [1.0]

class Mute(Exception):
    """Cannot say what was wrong."""
    def __str__(self):
        raise RuntimeError("mute")

def raises_mute(completions, **kwargs):
    raise Mute
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def spec(
    *functions: str, weights: tuple[float, ...] = (), task: str = "data", solved_at: float = 1.0
) -> RewardSpec:
    names = [name if name == "task" else f"my_rewards:{name}" for name in functions]
    return RewardSpec(task, names, weights, solved_at)


def score(
    spec: RewardSpec, problem: dict[str, Any], text: str, *, ids: tuple[int, ...] = (), step: int = 0
) -> Reward:
    scorer = Scorer(spec)
    try:
        (found,) = scorer.score([Completion(problem, text, ids, step)])
        return found
    finally:
        scorer.close()


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    both, problem = spec("exact", "length_penalty", weights=(2.0, 0.1)), {"prompt": "6*7", "answer": "42"}
    expected = Reward(2.0 - 0.1 * 3, True, parts={"exact": 1.0, "length_penalty": -3.0})
    assert score(both, problem, "42", ids=(5, 6, 7)) == expected
    assert not score(both, problem, "41", ids=(5,)).is_solved


MESSAGES = [{"role": "user", "content": "6*7"}]
CHAT = [{"role": "assistant", "content": "42"}]


@pytest.mark.parametrize(
    ("prompt", "prompts", "completions"),
    [
        ({"prompt": "6*7"}, ["6*7"], ["42"]),
        ({"messages": MESSAGES}, [MESSAGES], [CHAT]),
        ({"prompt": MESSAGES}, [MESSAGES], [CHAT]),
        ({"prompt_ids": [1, 2]}, [[1, 2]], ["42"]),
    ],
)
def test_functions_see_what_trl_gives_them(prompt: dict[str, Any], prompts: Any, completions: Any) -> None:
    """Of a conversation the completion is a message; all further columns are lists; prompt and completion
    are no columns."""
    problem = {**prompt, "problem_id": "p", "answer": "42", "extra": {"a": [1]}, "completion": "x"}
    error = score(spec("saw"), problem, "42", ids=(5, 6), step=7).error
    start, end = error.index("{"), error.rindex("}")
    assert json.loads(error[start : end + 1]) == {
        "prompts": prompts,
        "completions": completions,
        "ids": [[5, 6]],
        "step": 7,
        "columns": {"problem_id": ["p"], "answer": ["42"], "extra": [{"a": [1]}]},
    }


def test_none_is_left_out_of_the_sum_and_all_none_is_no_score() -> None:
    both = spec("where_it_applies", "without_kwargs", weights=(1.0, 0.5))
    assert score(both, {"kind": "code"}, "x").parts == {"where_it_applies": 1.0, "without_kwargs": 2.0}
    assert score(both, {"kind": "math"}, "x") == Reward(1.0, True, parts={"without_kwargs": 2.0})
    none = score(spec("where_it_applies"), {"kind": "math"}, "x")
    assert none == Reward(0.0, False, "not applicable: every reward function returned None")
    assert not none.is_scored


def test_the_tasks_own_score_is_one_of_the_functions_and_says_what_is_solved() -> None:
    own = spec("task", "without_kwargs", weights=(1.0, 0.1), task="my_rewards:TASK")
    assert score(own, {}, "42") == Reward(0.5 + 0.2, True, parts={"without_kwargs": 2.0, "task": 0.5})
    assert not score(own, {}, "41").is_solved
    judged_only = spec("task", "without_kwargs", weights=(0.0, 1.0), task="my_rewards:TASK")
    assert score(judged_only, {}, "41") == Reward(2.0, False, parts={"without_kwargs": 2.0, "task": 0.5})


def test_without_the_tasks_own_score_a_reward_of_solved_at_is_solved() -> None:
    assert score(spec("without_kwargs", solved_at=2.0), {}, "x").is_solved
    assert not score(spec("without_kwargs", solved_at=2.1), {}, "x").is_solved


def test_coroutines_run_side_by_side() -> None:
    parts = {"first_of_two": 1.0, "second_of_two": 10.0}
    assert score(spec(*parts), {}, "x") == Reward(11.0, True, parts=parts)


def test_all_coroutines_of_a_worker_share_a_loop_so_that_clients_can_live_on() -> None:
    scorer = Scorer(spec("keeps_a_client"))
    assert [scorer.score([Completion({}, "x")])[0].value for _ in range(3)] == [1.0, 1.0, 1.0]
    scorer.close()


def test_a_function_may_run_a_loop_of_its_own_and_may_be_an_object() -> None:
    assert score(spec("calls_run", "judge"), {}, "x").value == 0.75


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("async_fails", "async_fails: KeyError: 'judge', {file}:53"),
        ("async_exits", "async_exits: SystemExit: 3, {file}:56"),
    ],
)
def test_what_a_function_raises_is_named_with_its_place(name: str, error: str, tmp_path: Path) -> None:
    found = score(spec("without_kwargs", name), {}, "x")
    assert found == Reward(0.0, False, error.format(file=tmp_path / "my_rewards.py"))


NO_NUMBER = {"[float('nan')]": "nan", "['0.5']": "'0.5'", "[1j]": "1j", "[float('inf')]": "inf"}
NO_NUMBER |= {"[10**400]": repr(10**400)[:79] + "…"}


@pytest.mark.parametrize("returned", NO_NUMBER)
def test_what_is_no_finite_number_is_an_error(returned: str) -> None:
    error = score(spec("says"), {}, returned).error
    assert error == f"says: the reward is {NO_NUMBER[returned]}; it must be a finite number"


@pytest.mark.parametrize("returned", ["[0.5, 0.5]", "[]", "0.5", "None"])
def test_what_is_no_list_of_one_reward_is_an_error(returned: str) -> None:
    error = score(spec("says"), {}, returned).error
    assert error == f"says: returned {returned}; it must be a list with one reward a completion, 1 here"


def test_names_of_metrics_and_errors_that_cannot_be_said_stay_writable() -> None:
    assert score(spec("logs_half_a_character"), {}, "x").metrics == {"\\ud800": 1.0}
    assert score(spec("raises_mute"), {}, "x").error.startswith("raises_mute: Mute:, ")


def test_a_sum_that_is_not_finite_is_no_reward_either() -> None:
    error = score(spec("says", weights=(1e300,)), {}, "[1e300]").error
    assert error == "the weighted sum: the reward is inf; it must be a finite number"


@pytest.mark.parametrize("by_task", [False, True])
def test_a_reward_that_does_not_bear_being_looked_at_is_this_responses_error(by_task: bool) -> None:
    rule = RewardSpec("my_rewards:AWKWARD") if by_task else spec("says")
    error = score(rule, {}, "[Awkward()]").error
    assert error.startswith("RuntimeError: awkward, ")
    assert "my_rewards.py" in error


def test_numbers_of_other_libraries_are_numbers() -> None:
    found = score(spec("says"), {}, "__import__('numpy').array([0.5])")
    assert (found.value, type(found.value)) == (0.5, float)


def test_what_cannot_be_called_with_these_problems_is_refused_before_a_run() -> None:
    scorer = Scorer(spec("exact"))
    scorer.check({"prompt": "6*7", "answer": "42"})
    refusal = r"^rewards.functions: my_rewards:exact: missing .*'answer'; the problems offer kind, "
    with refused(refusal):
        scorer.check({"prompt": "6*7", "kind": "code"})
    for name, reason in (("nowhere", "has no 'nowhere'"), ("not_a_function", "is a int; give a function")):
        with refused(f"^reward function 'my_rewards:{name}'.*{reason}"):
            Scorer(spec(name))


def test_the_task_data_is_scored_by_functions_alone() -> None:
    assert "task data: scores nothing; give rewards.functions" in score(RewardSpec("data"), {}, "x").error


def test_workers_score_by_functions_and_the_step_says_the_mean_of_each() -> None:
    both = spec("where_it_applies", "logs", weights=(1.0, 0.5))
    with RewardPool(both, 2, timeout_seconds=30) as pool:
        for i in range(8):
            problem = {"kind": "code" if i < 2 else "math", "task": "even" if i % 2 == 0 else "odd"}
            pool.submit(("p", i), problem, "AB" if i == 0 else "x", (1, 2), 3)
        pool.complete([("p", i) for i in range(8)])
        rewards = pool.drain()
    summary = summarize([rewards["p", i] for i in range(8)])
    assert summary.parts == {"logs": 1.0, "where_it_applies": 1.0}
    assert summary.metrics == {"shout": 1 / 8}
    assert summary.reward_by_task == {"even": (1.5 + 3 * 0.5) / 4, "odd": (1.5 + 3 * 0.5) / 4}
    assert summary.solve_rate_by_task == {"even": 1 / 4, "odd": 1 / 4}
    assert math.isclose(summary.mean, 0.75)


def test_two_functions_of_one_name_keep_their_modules(tmp_path: Path) -> None:
    (tmp_path / "other_rewards.py").write_text("def exact(completions, **kwargs):\n    return [3.0]\n")
    found = score(RewardSpec("data", ("my_rewards:exact", "other_rewards:exact")), {"answer": "x"}, "x")
    assert found.parts == {"my_rewards:exact": 1.0, "other_rewards:exact": 3.0}


GROUPS = '''
calls = []

def standing(completions, completion_ids, **columns):
    """How many of the group are longer, and which sample it is."""
    calls.append(completions)
    return [10.0 * sum(len(o) > len(t) for o in completions) + i for i, t in enumerate(completions)]

def some(completions, kind):
    return [None if k is None else float(k) for k in kind]

def slow(completions):
    import time
    time.sleep(1.5)
    return [1.0 for _ in completions]

class Task:
    def problems(self, num, seed, **options):
        return []

    def score(self, problem, text):
        if text == "odd":
            raise KeyError(text)
        return {"reward": 0.5, "solved": True}

TASK = Task()
'''


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_groups.py").write_text(GROUPS)
    monkeypatch.delitem(sys.modules, "my_groups", raising=False)


def score_group(
    rule: RewardSpec, *problems_and_texts: tuple[dict[str, Any], str], workers: int = 0, timeout: float = 30
) -> list[Reward]:
    with RewardPool(rule, workers, timeout) as pool:
        for i, (problem, text) in enumerate(problems_and_texts):
            pool.submit(("p", i), problem, text)
        pool.complete(group := [("p", i) for i in range(len(problems_and_texts))])
        rewards = pool.drain(patience=60)
    return [rewards[response_id] for response_id in group]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("groups")
def test_a_function_compares_the_responses_of_a_group_in_the_order_of_samples(workers: int) -> None:
    rule = RewardSpec("my_groups:TASK", ("task", "my_groups:standing"), (2.0, 1.0))
    found = score_group(rule, ({}, "aaa"), ({}, "a"), ({}, "aa"), workers=workers)
    assert [reward.value for reward in found] == [1.0 + 0.0, 1.0 + 21.0, 1.0 + 12.0]
    assert [reward.parts["task"] for reward in found] == [0.5] * 3


@pytest.mark.usefixtures("groups")
def test_what_one_response_lacks_costs_it_its_own_score_alone() -> None:
    rule = RewardSpec("my_groups:TASK", ("task", "my_groups:some"))
    problems = [{"kind": 1, "task": "sums"}, {"kind": "nan"}, {}, {"kind": 2}]
    refused, no_number, left_out, fine = score_group(
        rule, *zip(problems, ["odd", "b", "c", "d"], strict=True)
    )
    assert (refused.error[:8], refused.task) == ("KeyError", "sums")
    assert no_number.error == "some: the reward is nan; it must be a finite number"
    assert (left_out, fine.value) == (Reward(0.5, True, parts={"task": 0.5}), 2.5)


def test_an_error_is_that_of_every_response_of_the_group() -> None:
    found = score_group(spec("without_kwargs"), *[({}, "x")] * 3)
    why = "without_kwargs: returned [2.0]; it must be a list with one reward a completion, 3 here"
    assert found == [Reward(0.0, False, why)] * 3


@pytest.mark.usefixtures("groups")
def test_a_group_has_the_time_of_all_its_responses() -> None:
    rule, responses = RewardSpec("data", ("my_groups:slow",)), [({}, "x")] * 3
    assert (
        score_group(rule, *responses, workers=1, timeout=1.0) == [Reward(1.0, True, parts={"slow": 1.0})] * 3
    )
    (late,) = score_group(rule, ({}, "x"), workers=1, timeout=1.0)
    assert late.error == "time-out: not scored within 1 s; tried twice"


@pytest.mark.usefixtures("groups")
def test_a_response_that_is_withdrawn_gets_no_reward_and_no_function_sees_it() -> None:
    with RewardPool(RewardSpec("my_groups:TASK", ("task", "my_groups:standing")), 0, 30) as pool:
        for i in range(3):
            pool.submit(("p", i), {}, "a" * (i + 1))
        pool.withdraw([("p", 0)])
        assert pool.collect() == {}, "the group is not complete"
        pool.complete([("p", 1), ("p", 2)])
        found = pool.drain(patience=60)
    assert {key: reward.value for key, reward in found.items()} == {("p", 1): 10.5, ("p", 2): 1.5}
    assert sys.modules["my_groups"].calls == [["aa", "aaa"]]
