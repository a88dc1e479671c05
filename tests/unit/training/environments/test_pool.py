"""Whatever a tool does, the policy reads one message, and the next call is answered."""

from __future__ import annotations

import pytest

from tests.unit.training.environments import bad_tools, tools
from tlt.base.config.load import load_config
from tlt.base.types import UserError
from tlt.tasks.environments.environment import Ask, Environments, EnvironmentSpec
from tlt.tasks.environments.pool import EnvironmentPool
from tlt.training.build.environment import check_rewards

BAD = EnvironmentSpec(tools=[f"{bad_tools.__name__}:bad"])
GAME = EnvironmentSpec(factories={"": f"{tools.__name__}:Game"})

SAID = {
    "raise": (True, '{"error": "RuntimeError: broken'),
    "hang": (True, '{"error": "bad: no result within 1.5 s"}'),
    "exit": (True, '{"error": "SystemExit: 3"}'),
    "die": (True, '{"error": "bad: the worker died: exit code 7"}'),
    "bytes": (False, "b'\\xff\\x00'"),
    "large": (True, '{"error": "the result has 10,000,000 characters'),
    "none": (False, "None"),
    "object": (False, "<class 'object'>"),
    "unwritable": (True, '{"error": "the result cannot be written as text (RuntimeError)"}'),
    "print": (False, "printed"),
    "fork": (False, "forked"),
    "half": (False, "half ? a character"),
    "interrupt": (True, '{"error": "KeyboardInterrupt'),
    "other": (False, "{'kind': 'other'}"),
}


def test_a_bad_tool_is_one_message_each() -> None:
    pool = EnvironmentPool[str](BAD, num_workers=2, timeout_seconds=1.5)
    try:
        for kind in SAID:
            pool.ask(kind, Ask("call", {}, name="bad", arguments={"kind": kind}))
        answers = {}
        while len(answers) < len(SAID):
            answers |= {told.key: told.answer for told in pool.collect(30.0)}
    finally:
        pool.close()
    for kind, (is_error, text) in SAID.items():
        said = answers[kind].text
        assert said is not None
        assert answers[kind].is_error == is_error, kind
        assert said.startswith(text), (kind, said)
        assert len(said) < 500
        assert answers[kind].is_late == (kind == "hang")
        assert not answers[kind].failure


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("absent", {}, "there is no tool 'absent'; the tools are bad"),
        ("bad", {}, "missing a required argument: 'kind'"),
        ("bad", {"kind": "x", "more": 1}, "unexpected keyword argument"),
        ("bad", [1], "the arguments of bad are no object"),
    ],
)
def test_a_wrong_call_is_told(name: str, arguments: object, text: str) -> None:
    answer = Environments(BAD).answer(Ask("call", {}, name=name, arguments=arguments))
    assert answer.is_error
    assert text in str(answer.text)


def test_an_environment_is_a_value() -> None:
    """Two conversations that part from one state do not see each other; another process goes on."""
    row = {"problem_id": "3"}
    here, there = Environments(GAME), Environments(GAME)
    call = Ask("call", row, name="add", arguments={"a": 1, "b": 1})
    first = here.answer(call)
    assert str(first.text).startswith("1: off by")
    for environments in (here, there, here):
        second = environments.answer(call._replace(state=first.state))
        assert str(second.text).startswith("2: off by")
        reward = environments.answer(Ask("reward", row, second.state)).reward
        assert reward == pytest.approx(2 / 4, abs=0.07)


def test_a_reset_is_told_of_thoughts_only_if_it_asks() -> None:
    row = {"problem_id": "3", "seed": 1, "in_thought": True}

    def said(name: str, columns: dict[str, object]) -> str | None:
        return (
            Environments(EnvironmentSpec(factories={"": f"{tools.__name__}:{name}"}))
            .answer(Ask("observe", columns))
            .text
        )

    assert (
        said("Columns", row) == said("Columns", {"problem_id": "3", "seed": 1}) == " ['problem_id', 'seed']"
    )
    assert said("Thoughtful", row) == " True, ['problem_id', 'seed']"


def test_a_call_that_dies_leaves_the_environment_as_it_was() -> None:
    spec = EnvironmentSpec(tools=BAD.tools, factories=GAME.factories)
    state = (
        Environments(spec)
        .answer(Ask("call", {"problem_id": "1"}, name="add", arguments={"a": 1, "b": 1}))
        .state
    )
    pool = EnvironmentPool[int](spec, num_workers=1, timeout_seconds=20.0)
    try:
        pool.ask(1, Ask("call", {"problem_id": "1"}, state, "bad", {"kind": "die"}))
        (told,) = pool.collect(30.0)
    finally:
        pool.close()
    assert told.answer.is_error
    assert told.answer.state == state


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (EnvironmentSpec(tools=["nowhere:f"]), "environment.tools 'nowhere:f'"),
        (EnvironmentSpec(tools=[f"{tools.__name__}:json"]), "environment.tools"),
        (EnvironmentSpec(tools=[f"{tools.__name__}:add"] * 2), "names one tool twice"),
        (EnvironmentSpec(factories={"": f"{tools.__name__}:add"}), "has no reset(**row)"),
    ],
)
def test_a_mistake_is_one_line(spec: EnvironmentSpec, place: str) -> None:
    with pytest.raises(UserError, match=r"^environment") as caught:
        Environments(spec)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_that_cannot_be_pickled_is_found_at_its_reset() -> None:
    spec = EnvironmentSpec(factories={"": f"{bad_tools.__name__}:Unpicklable"})
    pool = EnvironmentPool[int](spec, num_workers=1, timeout_seconds=20.0)
    try:
        pool.ask(1, Ask("observe", {"problem_id": "1"}))
        (told,) = pool.collect(30.0)
    finally:
        pool.close()
    assert "Unpicklable cannot be pickled" in told.answer.failure
    assert "__getstate__" in told.answer.failure


def test_where_environments_alone_score_each_that_a_row_names_gives_a_reward() -> None:
    factories = {"game": f"{tools.__name__}:Game", "mute": f"{bad_tools.__name__}:Mute"}
    section = {"model": {"path": "."}, "task": {"name": "data", "data": __file__}, "run": {"out_dir": "x"}}
    config = load_config({**section, "environment": {"factories": factories}})
    rows = [(f"f:{n}", {"environment": name}) for n, name in enumerate(factories, start=1)]
    check_rewards(config, rows[:1])
    with pytest.raises(UserError, match=r"f:2: its environment, 'mute', has no get_reward\(\)"):
        check_rewards(config, rows)
    functions = {"rewards": {"functions": [f"{tools.__name__}:score"]}}
    check_rewards(load_config({**section, **functions, "environment": {"factories": factories}}), rows)
