"""Products that the model cannot do by head, and a calculator that it can ask: see calculator.toml.

    What is 73914 * 28605?    ─▶ [73914 * 28605]    a turn that asks the calculator
    [2114309970]              ─▶ 2114309970         a turn that answers

A conversation in the prompt shows how.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.base.io.files import Record
from tlt.tasks.exact import ExactTask
from tlt.tasks.splits import Split, split_of

EXAMPLE = (31827, 4056)


def calculate(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Answers a turn that is a product in brackets; any other turn ends the response."""
    asked = re.fullmatch(r"\[(\d{1,9}) \* (\d{1,9})\]", messages[-1]["content"].strip())
    return f"[{int(asked[1]) * int(asked[2])}]" if asked else None


class Products(ExactTask):
    """The answer is the last number of the response's last turn."""

    name = "products"
    search = "any"

    def problems(self, num: int, seed: int, *, split: str = "train", digits: int = 5) -> list[Record]:
        """digits: of each factor."""

        def draw(rng: random.Random, split: Split) -> Record:
            while True:
                a, b = (rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2))
                if split_of(f"{min(a, b)} {max(a, b)}") == split:
                    return {"messages": _ask(a, b), "answer": str(a * b)}

        return self.draw_each(num, seed, split, draw)


def _ask(a: int, b: int) -> list[dict[str, str]]:
    x, y = EXAMPLE
    turns = [f"What is {x} * {y}?", f"[{x} * {y}]", f"[{x * y}]", f"{x * y}", f"What is {a} * {b}?"]
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


TASK = Products()
