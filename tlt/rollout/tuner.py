"""Which strategy for the batch that is running now."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.types import BatchState, Strategy, StrategyTuner

_DEPTH_BY_BATCH_SIZE = ((1, 10), (2, 8), (4, 6), (64, 4))
"""Chain depths that were fastest for the Countdown model on a CPU (docs/log.md); larger batches were not measured: off."""


class Fixed:
    """Always the same strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def strategies(self) -> Sequence[Strategy]:
        return (self.strategy,)

    def choose(self, batch: BatchState) -> Strategy:
        return self.strategy

    def observe(self, strategy: Strategy, batch: BatchState, num_tokens: int, seconds: float) -> None:
        """Nothing to learn."""


class ByBatchSize:
    """A table: the strategy of the first row whose bound the batch does not exceed, and off beyond the last row."""

    def __init__(self, rows: Sequence[tuple[int, Strategy]]) -> None:
        self.rows = sorted(rows, key=lambda row: row[0])

    @property
    def strategies(self) -> Sequence[Strategy]:
        return tuple(strategy for _, strategy in self.rows)

    def choose(self, batch: BatchState) -> Strategy:
        for bound, strategy in self.rows:
            if batch.num_running <= bound:
                return strategy
        return Strategy.OFF

    def observe(self, strategy: Strategy, batch: BatchState, num_tokens: int, seconds: float) -> None:
        """Nothing to learn."""


def make_tuner(speculation: str, drafter: str = "learned") -> StrategyTuner | None:
    """From the user's word: `off` (None: nothing is allocated for drafting), `adaptive` or DEPTHxWIDTHxBUDGET."""
    if speculation == "off":
        return None
    if speculation == "adaptive":
        return ByBatchSize([(bound, Strategy(drafter, depth, 1, depth)) for bound, depth in _DEPTH_BY_BATCH_SIZE])
    return Fixed(Strategy.parse(speculation, drafter))
