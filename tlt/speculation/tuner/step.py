"""A step of the engine, as a tuner learns from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.protocol import BatchState, StepOutcome


class Step(NamedTuple):
    """A step that ran: the strategy that it verified, its batch and its outcome."""

    strategy: Strategy
    batch: BatchState
    outcome: StepOutcome

    @property
    def drafted(self) -> Strategy:
        """Returns the strategy of the drafts that it made."""
        return self.outcome.drafted_next or self.strategy

    @property
    def is_typical(self) -> bool:
        """Returns whether its seconds hold no prefill of prompts."""
        return not self.batch.num_admitted or self.batch.prefill_time is not None

    def kind(self) -> tuple[Any, ...]:
        """Returns what steps that are learned as one have in common."""
        return self.strategy, self.drafted, self.batch.num_running, self.is_typical

    @property
    def levels(self) -> float:
        """Returns the levels that the learned drafter drafted: those of the longest chain that is from no
        reference."""
        if self.drafted != self.strategy:
            return float(self.drafted.without_reference.depth)
        outcome = self.outcome
        from_reference = outcome.from_reference or (False,) * len(outcome.drafted)
        own = [num for num, uses_one in zip(outcome.drafted, from_reference, strict=True) if not uses_one]
        return float(self.strategy.depth if self.strategy.width > 1 else max(own, default=0))
