"""What a tuner promises, and the state that it chooses by. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
class ShadowDraft:
    """The outcome of a chain that retrieval would have drafted by `STRATEGY`.

    Tokens do not depend on the drafter, so later tokens show how many would have been accepted.
    """

    drafted: int
    accepted: int
    STRATEGY: ClassVar[Strategy] = Strategy("ngram", 15, 1, 15)


class PrefillTime(NamedTuple):
    num_tokens: int
    num_forwards: int
    seconds: float


class RunningSequence(NamedTuple):
    """num_left: tokens expected until its end."""

    name: Hashable
    num_left: float


@dataclass(frozen=True)
class BatchState:
    """The running batch: all that a tuner may choose by.

    mean_length: committed tokens per sequence, prompt included.
    num_admitted: sequences new in this step; a drafter may have to read their prompts.
    reference_drafts: one for each sequence that has a reference.
    shadow_drafts: chains of retrieval judged since the last step.
    num_left: tokens expected per running sequence, waiting requests' included; None: unknown.
    prefill_time: of prompts read before this step; None: none was timed.
    sequences: one for each; (): unknown, taken to progress alike.
    """

    num_running: int
    mean_length: float
    policy_version: int
    drafter_version: int
    num_admitted: int = 0
    reference_drafts: tuple[ReferenceDraft, ...] = ()
    shadow_drafts: tuple[ShadowDraft, ...] = ()
    num_left: float | None = None
    prefill_time: PrefillTime | None = None
    sequences: tuple[RunningSequence, ...] = ()


@dataclass(frozen=True)
class StepOutcome:
    """num_tokens: committed by all sequences.
    accepted: drafted tokens, by sequence; (): nothing was drafted.
    drafted: nodes, one entry per entry of `accepted`.
    seconds: of the whole step, drafting included.
    from_reference: by sequence; (): no draft came from a reference.
    drafted_next: strategy of drafts made for the next step; None: the step verified its own drafts.
    names: as in `RunningSequence`, one per entry of `accepted`; (): unknown.
    """

    num_tokens: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float
    from_reference: tuple[bool, ...] = ()
    drafted_next: Strategy | None = None
    names: tuple[Hashable, ...] = ()


class ExpectedSpeeds(NamedTuple):
    """Expected tokens per second of the running batch; None: no prediction."""

    chosen: float | None = None
    otherwise: float | None = None
    """The best without references; None also where the chosen strategy uses none."""


NO_EXPECTATION = ExpectedSpeeds()


class StrategyTuner:
    """Chooses a strategy for every engine step. This base learns nothing."""

    expected = NO_EXPECTATION
    """Of the latest choice's batch."""

    def choose(self, batch: BatchState) -> Strategy:
        raise NotImplementedError

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        """Learns from a step that ran."""

    def counters(self) -> dict[str, Any]:
        """Returns what was learned, as JSON."""
        return {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continues from the result of `counters`."""
