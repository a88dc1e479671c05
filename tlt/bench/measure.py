"""Measures engines side by side: they do the same work in turns, and the ratio of their seconds gets an interval.

off ▕ on ▕ on ▕ off ▕ off ▕ on …
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.types import Request

T = TypeVar("T")

_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; 1.96 + 2.5 / df beyond."""


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios with its 95 % confidence interval (Student's t of the logarithms).

    low, high: None where a single pair tells no interval.
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        logs = [math.log(value) for value in values]
        center = statistics.mean(logs)
        if len(logs) == 1:
            return Ratio(values[0], None, None, tuple(values))
        freedom = len(logs) - 1
        t = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.5 / freedom
        half = t * statistics.stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(center), math.exp(center - half), math.exp(center + half), tuple(values))

    @staticmethod
    def between(base: Sequence[float], other: Sequence[float]) -> Ratio:
        """Returns base / other, pair by pair."""
        return Ratio.of([a / b for a, b in zip(base, other, strict=True)])


def in_turns(tasks: Mapping[str, Callable[[], T]], num_rounds: int) -> dict[str, list[T]]:
    """Runs every task once in each round, in alternating order; returns what each returned, round by round."""
    results: dict[str, list[T]] = {name: [] for name in tasks}
    for index in range(num_rounds):
        for name in tasks if index % 2 == 0 else reversed(list(tasks)):
            results[name].append(tasks[name]())
    return results


# ── constant batches ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Stretch:
    """Keeps an engine at one batch size by an endless supply of requests."""

    engine: RolloutBackend
    supply: Callable[[int], Sequence[Request]]
    batch_size: int
    helping: int = 0

    def run(self, seconds: float) -> float:
        """Generates for about so many seconds; returns the tokens per second."""
        tokens, start = self.engine.stats.num_tokens, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            while self.engine.num_waiting < self.batch_size:
                self.engine.add(self.supply(self.helping))
                self.helping += 1
            self.engine.step()
        return (self.engine.stats.num_tokens - tokens) / elapsed


def constant_batch(
    engines: Mapping[str, RolloutBackend],
    supply: Callable[[int], Sequence[Request]],
    batch_size: int,
    num_rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Returns every engine's tokens per second, one value for each round.

    engines: decode `batch_size` sequences at a time.  supply: gives the i-th helping of requests.
    seconds: of one engine in one round; before the first round each warms up for three times as long.
    """
    stretches = {name: _Stretch(engine, supply, batch_size) for name, engine in engines.items()}
    for stretch in stretches.values():
        stretch.run(3 * seconds)
        stretch.engine.stats = EngineStats()
    return in_turns({name: partial(stretch.run, seconds) for name, stretch in stretches.items()}, num_rounds)
