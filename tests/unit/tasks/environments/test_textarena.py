"""Games of textarena as environments: by a stand-in wherever tests run, and by the library where it is
installed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tlt.tasks.environments.environment import Answer, Ask, Environments, EnvironmentSpec

FACTORY = "tlt.tasks.environments.textarena:Game"
SPEC = EnvironmentSpec(factories={"": FACTORY})
MODULES = ("textarena", FACTORY.partition(":")[0])
GUESS = {"problem_id": "1", "game": "GuessTheNumber-v0", "seed": 3}


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "textarena" or name == MODULES[1]]:
        del sys.modules[name]


@pytest.fixture(params=["stand-in", "library"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    if request.param == "library":
        pytest.importorskip("textarena", reason="textarena is not installed")
    else:
        monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins")
    yield
    forget()


def say(environments: Environments, row: dict[str, Any], text: str, state: str) -> Answer:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return environments.answer(Ask("respond", row, state, messages=messages))


def reward(environments: Environments, row: dict[str, Any], state: str) -> float | None:
    return environments.answer(Ask("reward", row, state)).reward


def test_a_game_is_played_to_its_end_and_rewards() -> None:
    """By halving, 20 numbers take five guesses."""
    environments = Environments(SPEC)
    assert environments.speaks
    assert environments.gives_reward
    begin = environments.answer(Ask("observe", GUESS)).text
    assert "between 1 and 20" in str(begin)
    low, high, state = 1, 20, ""
    for _ in range(5):
        guess = (low + high) // 2
        said = say(environments, GUESS, f"<think>[21]</think>[{guess}]", state)
        state = said.state
        if said.text is None:
            break
        assert said.text in ("The target number is higher.", "The target number is lower.")
        assert reward(environments, GUESS, state) == 0.0  # it goes on
        low, high = (guess + 1, high) if "higher" in said.text else (low, guess - 1)
    assert said.text is None
    assert reward(environments, GUESS, state) == 1.0


def test_options_are_the_games_own_and_its_wrappers_read_the_move() -> None:
    environments = Environments(SPEC)
    row = {**GUESS, "options": {"max_number": 3}}
    assert "between 1 and 3" in str(environments.answer(Ask("observe", row)).text)
    said = [say(environments, row, str(guess), "") for guess in (1, 2, 3)]  # a wrapper writes brackets
    assert [reward(environments, row, one.state) for one in said if one.text is None] == [1.0]


def test_a_seed_gives_the_same_game_whatever_else_is_drawn_and_played() -> None:
    row, moves = {"problem_id": "1", "game": "2048-v0", "seed": 5}, ("[up]", "[left]", "[down]", "[left]")

    def play(disturbs: bool) -> list[str | None]:
        state, said = "", [Environments(SPEC).answer(Ask("observe", row)).text]
        for move in moves:
            if disturbs:
                random.seed()
                Environments(SPEC).answer(Ask("observe", {**row, "seed": 6}))
            answer = say(Environments(SPEC), row, move, state)
            state = answer.state
            said.append(answer.text)
        return said

    assert play(disturbs=False) == play(disturbs=True)
    assert len(set(play(disturbs=False))) > 3


def test_what_cannot_be_played_alone_is_refused() -> None:
    for game, why in (("QuantumTicTacToe-v0", "is for several players"), ("Chess-v9", "Chess-v9 not found")):
        with pytest.raises(ValueError, match=why):
            Environments(SPEC).answer(Ask("observe", {"problem_id": "1", "game": game}))


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "textarena", None)
    with refused(r"environment: no module 'textarena'; pip install "):
        Environments(SPEC)
