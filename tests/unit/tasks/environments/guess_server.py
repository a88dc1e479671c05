"""A server of OpenEnv with a game: python guess_server.py PORT. Without a seed its number is another each time."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
from openenv.core.env_server.types import State


class Guess(Action):
    message: str


class Said(Observation):
    text: str


class Game(Environment):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        self.number = random.Random(seed).randint(1, 10**6 if seed is None else 20)
        return Said(text=f"Guess the number: {self.number % 2}." if seed else f"Guess {self.number}.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Said:
        guess = int(action.message) if action.message.isdigit() else -1
        if guess == self.number:
            return Said(text="right", reward=1.0, done=True)
        return Said(text="lower" if guess > self.number else "higher", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Game, Guess, Said), port=int(sys.argv[1]), log_level="warning")
