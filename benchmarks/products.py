"""Products of three numbers, for a model that multiplies two numbers at a time by a tool: the workload of tools.py.

    What is 739 * 286 * 415?  ─▶ multiply(739, 286) ─▶ 211354 ─▶ multiply(211354, 415) ─▶ 87711910 ─▶ 87711910

The prompt holds two conversations that show how, so that a small model that has learned nothing calls, too; at one it seldom does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tlt.base.io.files import Record
from tlt.tasks.exact import ExactTask
from tlt.tasks.splits import Split

EXAMPLES = ((812, 437, 96), (655, 273, 184))


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: a number
        b: a number
    """
    return a * b


def _after(seconds: float) -> Callable[[int, int], int]:
    def waits(a: int, b: int) -> int:
        time.sleep(seconds)
        return a * b

    waits.__name__, waits.__doc__ = multiply.__name__, multiply.__doc__
    return waits


multiply_50ms, multiply_2s = _after(0.05), _after(2.0)


class Products(ExactTask):
    """The answer is the last number of the response's last turn."""

    name = "products"
    search = "any"

    def problems(self, num: int, seed: int, *, split: str = "train") -> list[Record]:
        def draw(rng: random.Random, split: Split) -> Record:
            a, b, c = (rng.randint(100, 999) for _ in range(3))
            shown = [message for example in EXAMPLES for message in _conversation(*example)]
            return {"messages": [*shown, _conversation(a, b, c)[0]], "answer": str(a * b * c)}

        return self.draw_each(num, seed, split, draw)


def _conversation(a: int, b: int, c: int) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "user", "content": f"What is {a} * {b} * {c}?"}]
    for x, y in ((a, b), (a * b, c)):
        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": x, "b": y}}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "name": "multiply", "content": str(x * y)})
    return [*said, {"role": "assistant", "content": str(a * b * c)}]


TASK = Products()
