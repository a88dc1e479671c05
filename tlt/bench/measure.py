"""Measures engines side by side: they do the same work in turns, and the ratio of their seconds gets an interval.

constant batch   off ▕ on ▕ on ▕ off ▕ off ▕ on …     stretches of a few seconds at one batch size
a workload       off, adaptive, table │ table, adaptive, off │ …     whole rollouts, each with a tuner that knows nothing
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.types import Request, Rollout

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


# ── constant batches ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Stretch:
    """Keeps an engine at one batch size by an endless supply of requests."""

    engine: RolloutEngine
    supply: Callable[[int], Sequence[Request]]
    batch_size: int
    helping: int = 0

    def run(self, seconds: float) -> tuple[int, float]:
        """Generates for about so many seconds; returns the tokens and the seconds that it took."""
        tokens, start = self.engine.stats.num_tokens, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            while len(self.engine.scheduler.waiting) < self.batch_size:
                self.engine.add(self.supply(self.helping))
                self.helping += 1
            self.engine.step()
        return self.engine.stats.num_tokens - tokens, elapsed


def constant_batch(
    engines: Mapping[str, RolloutEngine],
    supply: Callable[[int], Sequence[Request]],
    batch_size: int,
    num_rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Returns every engine's tokens per second, one value for each round.

    supply: gives the i-th helping of requests.  seconds: of one engine in one round; before the first round each
    warms up for three times as long.
    """
    stretches = {name: _Stretch(engine, supply, batch_size) for name, engine in engines.items()}
    for stretch in stretches.values():
        stretch.engine.scheduler.max_slots = batch_size
        stretch.run(3 * seconds)
        stretch.engine.stats = EngineStats()
    names = list(engines)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(num_rounds):
        for name in names if index % 2 == 0 else reversed(names):
            tokens, elapsed = stretches[name].run(seconds)
            speeds[name].append(tokens / elapsed)
    return speeds


# ── whole rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Trace:
    """The course of one rollout: after every step the seconds since its start, the running requests and the tokens so far.

    prediction_error: |predicted / real speed - 1|, averaged over strategies by their seconds; None where nothing was predicted.
    """

    times: tuple[float, ...]
    running: tuple[int, ...]
    tokens: tuple[int, ...]
    accept_length: float | None
    strategy_seconds: Mapping[str, float]
    prediction_error: float | None

    @property
    def seconds(self) -> float:
        return self.times[-1]

    def seconds_since(self, share: float) -> float:
        """Returns the seconds from the step that completed this share of the tokens to the end."""
        first = next(i for i, tokens in enumerate(self.tokens) if tokens >= share * self.tokens[-1])
        return self.times[-1] - (self.times[first] if share else 0.0)


def trace(engine: RolloutEngine, requests: Sequence[Request]) -> tuple[list[Rollout], Trace]:
    """Generates responses to all requests; returns them in the order of (problem, sample), and the course of the rollout."""
    engine.stats = EngineStats()
    times, running, tokens, rollouts = [], [], [], []
    start = time.perf_counter()
    engine.add(requests)
    while not engine.is_idle:
        rollouts += [finished.rollout for finished in engine.step()]
        times.append(time.perf_counter() - start)
        running.append(len(engine.running))
        tokens.append(engine.stats.num_tokens)
    stats = engine.stats
    by_seconds = {name: s.seconds for name, s in stats.by_strategy.items()}
    errors = [
        (abs(s.predicted_speed / (s.num_tokens / s.seconds) - 1), s.seconds)
        for s in stats.by_strategy.values()
        if s.predicted_speed is not None
    ]
    error = sum(e * w for e, w in errors) / sum(w for _, w in errors) if errors else None
    rollouts.sort(key=lambda r: (r.problem_id, r.sample_index))
    return rollouts, Trace(tuple(times), tuple(running), tuple(tokens), stats.accept_length, by_seconds, error)


def side_by_side(
    make_engine: Mapping[str, Callable[[], RolloutEngine]],
    requests: Sequence[Request],
    num_rounds: int,
    on_trace: Callable[[str, Trace], None] = lambda name, trace: None,
) -> tuple[dict[str, list[Trace]], int]:
    """Runs the same rollout with every variant `num_rounds` times, each in a fresh engine, in alternating order.

    Returns the traces by variant, and how many responses differed from those of the first rollout (in float32 a near-tie may).
    """
    traces: dict[str, list[Trace]] = {name: [] for name in make_engine}
    reference: list[tuple[int, ...]] | None = None
    num_different = 0
    names = list(make_engine)
    for index in range(num_rounds):
        for name in names if index % 2 == 0 else reversed(names):
            rollouts, measured = trace(make_engine[name](), requests)
            traces[name].append(measured)
            on_trace(name, measured)
            tokens = [rollout.token_ids for rollout in rollouts]
            reference = reference or tokens
            num_different += sum(a != b for a, b in zip(tokens, reference, strict=True))
    return traces, num_different
