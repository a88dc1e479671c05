"""As much of textarena 0.7's interface as the adapter asks for, and three games."""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import Any


class ObservationType(Enum):
    PROMPT = auto()
    PLAYER_ACTION = auto()
    GAME_MESSAGE = auto()


class State:
    def __init__(self) -> None:
        self.observations: list[tuple[int, str, ObservationType]] = []
        self.rewards: dict[int, float] | None = None


class SinglePlayerState(State):
    pass


class TwoPlayerState(State):
    pass


class Env:
    state: State

    def get_observation(self) -> tuple[int, list[Any]]:
        new, self.state.observations = self.state.observations, []
        return 0, new

    def close(self) -> tuple[Any, Any]:
        return self.state.rewards, {}

    def say(self, text: str, kind: ObservationType = ObservationType.GAME_MESSAGE) -> None:
        self.state.observations.append((-1, text, kind))


class Wrapper(Env):
    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:  # without end where `env` is missing, as in a pickle
        return getattr(self.env, name)

    def step(self, action: str) -> tuple[bool, Any]:
        done: tuple[bool, Any] = self.env.step(action if "[" in action else f"[{action}]")
        return done


class Guess(Env):
    def __init__(self, max_number: int = 20) -> None:
        self.max_number = max_number

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state, self.number = SinglePlayerState(), random.randint(1, self.max_number)
        self.say(f"Guess the number between 1 and {self.max_number}.", ObservationType.PROMPT)

    def step(self, action: str) -> tuple[bool, Any]:
        self.say(action, ObservationType.PLAYER_ACTION)
        guess = int(action.strip("[]"))
        if guess == self.number:
            self.state.rewards = {0: 1}
        self.say(f"The target number is {'lower' if guess > self.number else 'higher'}.")
        return self.state.rewards is not None, {}


class Tiles(Env):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = SinglePlayerState()
        self.say(f"{random.random()}", ObservationType.PROMPT)

    def step(self, action: str) -> tuple[bool, Any]:
        self.say(f"{random.random()}")
        return False, {}


class ForTwo(Env):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = TwoPlayerState()


GAMES = {"GuessTheNumber-v0": Guess, "2048-v0": Tiles, "QuantumTicTacToe-v0": ForTwo}


def make(game: str, **options: Any) -> Wrapper:
    if game not in GAMES:
        raise ValueError(f"Environment {game} not found in registry.")
    return Wrapper(Wrapper(GAMES[game](**options)))
