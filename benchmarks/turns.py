"""Measurements in turns.

off ▕ on ▕ on ▕ off ▕ off ▕ on …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


def rounds_in_turns(tasks: Mapping[str, Callable[[], T]], num_rounds: int) -> Iterator[dict[str, list[T]]]:
    """Yields all results after each round."""
    results: dict[str, list[T]] = {name: [] for name in tasks}
    for index in range(num_rounds):
        for name in tasks if index % 2 == 0 else reversed(list(tasks)):
            results[name].append(tasks[name]())
        yield results


def in_turns(tasks: Mapping[str, Callable[[], T]], num_rounds: int) -> dict[str, list[T]]:
    *_, results = rounds_in_turns(tasks, num_rounds)
    return results
