"""What a tuner promises, and the state that it chooses by. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt.base.strategy import Strategy


@dataclass(frozen=True)
class ReferenceDraft:
    """Up to `length` tokens, each accepted with chance `rate` after the others."""

    rate: float
    length: int

    def expected(self, depth: int) -> float:
        num = min(depth, self.length)
        return self.rate * (1 - self.rate**num) / (1 - self.rate)


@dataclass(frozen=True)
class BatchState:
    """The running batch: all that a tuner may choose by.

    num_admitted: sequences new in this step; a drafter may have to read their prompts.
    reference_drafts: one for each sequence that has a reference.
    num_cached: tokens whose keys and values a forward reads; 0: unknown.
    """

    num_running: int
    policy_version: int
    drafter_version: int
    num_admitted: int = 0
    reference_drafts: tuple[ReferenceDraft, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True)
class StepOutcome:
    """num_tokens: committed by all sequences.
    accepted: drafted tokens, by sequence; (): nothing was drafted.
    drafted: nodes, one entry per entry of `accepted`.
    seconds: of the whole step, drafting included.
    from_reference: by sequence; (): no draft came from a reference.
    drafted_next: strategy of drafts made for the next step; None: the step verified its own drafts.
    """

    num_tokens: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float
    from_reference: tuple[bool, ...] = ()
    drafted_next: Strategy | None = None


class Choice(NamedTuple):
    """A strategy, and tokens per second expected of the batch; None: no prediction.

    otherwise: of the best strategy without references; None also where the chosen one uses none.
    """

    strategy: Strategy
    speed: float | None = None
    otherwise: float | None = None


class StrategyTuner:
    """Chooses a strategy for every engine step. This base learns nothing."""

    def choose(self, batch: BatchState) -> Choice:
        raise NotImplementedError

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        """Learns from a step that ran."""

    def counters(self) -> dict[str, Any]:
        """Returns what was learned, as JSON."""
        return {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continues from the result of `counters`."""
