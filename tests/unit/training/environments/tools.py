"""Tools that count what they are asked, and environments of several kinds. Imported by workers: nothing heavy."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any


def _note(what: str) -> None:
    """One line a call, in a file that the test names; then a delay, "0.05" or at random "0:0.2", in seconds."""
    if path := os.environ.get("TLT_TEST_CALLS"):
        with open(path, "a") as file:
            file.write(what + "\n")
    least, _, most = os.environ.get("TLT_TEST_DELAY", "0").partition(":")
    time.sleep(random.uniform(float(least), float(most or least)))


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    _note(f"add {a} {b}")
    if a == b == 3:
        raise ValueError("too many")
    return a + b


async def look_up(word: str) -> dict[str, Any]:
    """Looks a word up.

    Args:
        word: the word
    """
    _note(f"look_up {word}")
    return {"word": word, "count": len(word)}


class Game:
    """A game with a memory: guesses are answered by the difference from a number of the row's."""

    def __init__(self) -> None:
        self.guesses = 0

    def reset(self, **row: Any) -> str:
        self.number = random.Random(str(row["problem_id"])).randrange(7)
        return f" (of {self.number % 2})"

    def add(self, a: int, b: int) -> str:
        """Guesses a + b.

        Args:
            a: the first
            b: the second
        """
        self.guesses += 1
        return f"{self.guesses}: off by {abs(a + b - self.number)}"

    def respond(self, messages: list[dict[str, Any]]) -> str | None:
        return f"guess {self.guesses}" if self.guesses < 3 and len(messages) < 6 else None

    def get_reward(self) -> float:
        return self.guesses / 4 + self.number / 100


class Listener:
    """Never ends a response; the reward is how many turns it heard, in tenths."""

    def reset(self, **row: Any) -> None:
        self.heard = 0

    def respond(self, messages: list[dict[str, Any]]) -> str:
        self.heard += 1
        return "go on"

    def get_reward(self) -> float:
        return self.heard / 10


def echo(messages: list[dict[str, Any]]) -> str | None:
    """Answers with the length of what was said, three times."""
    said = [message for message in messages if message["role"] == "assistant"]
    _note("echo")
    return f"{len(said[-1]['content'])}?" if len(said) < 3 else None


def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Depends on every message."""
    return [(len(json.dumps(completion)) % 17) / 16 for completion in completions]


def guessed(environments: list[Game], **columns: Any) -> list[float]:
    """Read from the instances."""
    return [game.guesses / 8 for game in environments]


class Columns:
    def reset(self, **row: object) -> str:
        return f" {sorted(row)}"


class Thoughtful:
    def reset(self, in_thought: bool = False, **row: object) -> str:
        return f" {in_thought}, {sorted(row)}"
