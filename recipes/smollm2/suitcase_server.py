"""A server of OpenEnv with a game of memory: python suitcase_server.py PORT. See openenv.toml.

I pack a lamp.   ─▶ a lamp                  1 thing of 10
I pack a kite.   ─▶ a lamp, a kite          2
I pack a drum.   ─▶ a lamp, a drum          2: one is forgotten
I pack a vase.   ─▶ a lamp, a dog, a vase   1: a thing that was never packed takes one away
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
from openenv.core.env_server.types import State

THINGS = ["ball", "bell", "book", "bowl", "box", "brush", "card", "clock", "coat"]
THINGS += ["comb", "cup", "doll", "drum", "fork", "jar", "key", "kite", "knife"]
THINGS += ["lamp", "map", "mug", "ring", "rope", "shoe", "spoon", "vase"]
NUM_TURNS = 4
NUM_NAMED = NUM_TURNS * (NUM_TURNS + 1) // 2
MAX_SESSIONS = 64


class Reply(Action):
    text: str


class Packed(Observation):
    text: str


class Suitcase(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Packed:
        self.things = [f"a {thing}" for thing in random.Random(seed).sample(THINGS, NUM_TURNS)]
        self.num_packed = 1
        return Packed(text=f"I pack {self.things[0]}.")

    def step(self, action: Reply, timeout_s: float | None = None, **more: Any) -> Packed:
        packed, said = {*self.things[: self.num_packed]}, {*action.text.strip().split(", ")}
        reward = max(0, len(said & packed) - len(said - packed)) / NUM_NAMED
        if self.num_packed == NUM_TURNS:
            return Packed(text="", reward=reward, done=True)
        self.num_packed += 1
        return Packed(text=f"I pack {self.things[self.num_packed - 1]}.", reward=reward)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Suitcase, Reply, Packed, max_concurrent_envs=MAX_SESSIONS)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
