"""Whole rollouts side by side, each with a tuner that knows nothing: their course, and whether their tokens differ.

off, adaptive, table │ table, adaptive, off │ …
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tlt.bench.measure import in_turns
from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.types import Request, Rollout


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
        (abs(s.predicted_speed / s.speed - 1), s.seconds) for s in stats.by_strategy.values() if s.predicted_speed is not None
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
    texts: list[list[tuple[int, ...]]] = []

    def run(name: str) -> Trace:
        rollouts, measured = trace(make_engine[name](), requests)
        on_trace(name, measured)
        texts.append([rollout.token_ids for rollout in rollouts])
        return measured

    traces = in_turns({name: partial(run, name) for name in make_engine}, num_rounds)
    return traces, sum(a != b for other in texts for a, b in zip(other, texts[0], strict=True))
