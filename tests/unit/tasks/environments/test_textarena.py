"""Games of textarena as environments."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from tests.refused import refused
from tests.unit.tasks.environments.played import begin, environments, library, reward, say

GAME = "textarena:Game"
GUESS = {"problem_id": "1", "game": "GuessTheNumber-v0", "seed": 3}


@pytest.fixture(params=["stand-in", "library"], autouse=True)
def textarena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with library("textarena", request.param == "stand-in", monkeypatch):
        yield


def test_a_game_is_played_to_its_end_and_rewards() -> None:
    """By halving, 20 numbers take five guesses."""
    asked = environments(GAME)
    assert asked.speaks
    assert asked.gives_reward
    assert "between 1 and 20" in str(begin(asked, GUESS))
    low, high, state = 1, 20, ""
    for _ in range(5):
        guess = (low + high) // 2
        said = say(asked, GUESS, f"<think>[21]</think>[{guess}]", state)
        state = said.state
        if said.text is None:
            break
        assert said.text in ("The target number is higher.", "The target number is lower.")
        assert reward(asked, GUESS, state) == 0.0  # it goes on
        low, high = (guess + 1, high) if "higher" in said.text else (low, guess - 1)
    assert said.text is None
    assert reward(asked, GUESS, state) == 1.0


def test_options_are_the_games_own_and_its_wrappers_read_the_move() -> None:
    asked = environments(GAME)
    row = {**GUESS, "options": {"max_number": 3}}
    assert "between 1 and 3" in str(begin(asked, row))
    said = [say(asked, row, str(guess), "") for guess in (1, 2, 3)]  # a wrapper writes brackets
    assert [reward(asked, row, one.state) for one in said if one.text is None] == [1.0]


def test_a_seed_gives_the_same_game_whatever_else_is_drawn_and_played() -> None:
    row, moves = {"problem_id": "1", "game": "2048-v0", "seed": 5}, ("[up]", "[left]", "[down]", "[left]")

    def play(disturbs: bool) -> list[str | None]:
        state, said = "", [begin(environments(GAME), row)]
        for move in moves:
            if disturbs:
                random.seed()
                begin(environments(GAME), {**row, "seed": 6})
            answer = say(environments(GAME), row, move, state)
            state = answer.state
            said.append(answer.text)
        return said

    assert play(disturbs=False) == play(disturbs=True)
    assert len(set(play(disturbs=False))) > 3


def test_what_cannot_be_played_alone_is_refused() -> None:
    for game, why in (("QuantumTicTacToe-v0", "is for several players"), ("Chess-v9", "Chess-v9 not found")):
        with pytest.raises(ValueError, match=why):
            begin(environments(GAME), {"problem_id": "1", "game": game})


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with refused(r"environment: no module 'textarena'; pip install "):
        environments(GAME)
