"""Measures in turns: the same work in each round. report/ratio.py compares the paired seconds.

off ▕ on ▕ on ▕ off ▕ off ▕ on …
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


def rounds_in_turns(tasks: Mapping[str, Callable[[], T]], num_rounds: int) -> Iterator[dict[str, list[T]]]:
    """Runs every task once in each round, in alternating order. Yields all results after each round."""
    results: dict[str, list[T]] = {name: [] for name in tasks}
    for index in range(num_rounds):
        for name in tasks if index % 2 == 0 else reversed(list(tasks)):
            results[name].append(tasks[name]())
        yield results


def in_turns(tasks: Mapping[str, Callable[[], T]], num_rounds: int) -> dict[str, list[T]]:
    """Runs every task once in each round, in turns; returns each task's results, round by round."""
    *_, results = rounds_in_turns(tasks, num_rounds)
    return results


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
