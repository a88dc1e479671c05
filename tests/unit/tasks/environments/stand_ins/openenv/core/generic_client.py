"""As much of openenv 0.10's interface as the adapter asks for, and the game of guess_server.py behind it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class GenericEnvClient:
    def __init__(self, base_url: str) -> None:
        assert base_url.startswith("http://127.0.0.1:")

    def sync(self) -> GenericEnvClient:
        return self

    def __enter__(self) -> GenericEnvClient:
        return self

    def __exit__(self, *error: object) -> None:
        del self.number  # a session's end

    def reset(self, seed: int | None = None) -> StepResult:
        self.number = random.Random(seed).randint(1, 10**6 if seed is None else 20)
        return StepResult(
            {"text": f"Guess the number: {self.number % 2}." if seed else f"Guess {self.number}."}
        )

    def step(self, action: dict[str, Any]) -> StepResult:
        guess = int(action["message"])
        if guess == self.number:
            return StepResult({"text": "right"}, 1.0, True)
        return StepResult({"text": "lower" if guess > self.number else "higher"}, -0.1)
