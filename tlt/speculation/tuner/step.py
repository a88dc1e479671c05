"""A step of the engine, as a tuner learns from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.protocol import BatchState, StepOutcome


class Step(NamedTuple):
    strategy: Strategy
    batch: BatchState
    outcome: StepOutcome

    @property
    def drafted(self) -> Strategy:
        return self.outcome.drafted_next or self.strategy

    @property
    def is_typical(self) -> bool:
        """Whether its seconds exclude prefill."""
        return not self.batch.num_admitted or self.batch.prefill_time is not None

    def kind(self) -> tuple[Any, ...]:
        """The key that groups similar steps."""
        return self.strategy, self.drafted, self.batch.num_running, self.is_typical

    @property
    def levels(self) -> float:
        """Levels of the learned drafter: its longest chain, references excluded."""
        if self.drafted != self.strategy:
            return float(self.drafted.without_reference.depth)
        outcome = self.outcome
        from_reference = outcome.from_reference or (False,) * len(outcome.drafted)
        own = [num for num, uses_one in zip(outcome.drafted, from_reference, strict=True) if not uses_one]
        return float(self.strategy.depth if self.strategy.width > 1 else max(own, default=0))
