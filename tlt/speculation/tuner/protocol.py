"""What a tuner of strategies promises, and the state that it chooses by. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tlt.base.strategy import Strategy


@dataclass(frozen=True)
class ReferenceDraft:
    """A draft from a reference: up to `length` tokens, each accepted with chance `rate` after the others."""

    rate: float
    length: int

    def expected(self, depth: int) -> float:
        """Returns the expected number of accepted tokens of a draft of at most `depth`."""
        num = min(depth, self.length)
        return self.rate * (1 - self.rate**num) / (1 - self.rate)


@dataclass(frozen=True)
class Hindsight:
    """The outcome of a chain that retrieval would have drafted by `STRATEGY`.

    Tokens do not depend on the drafter. So the tokens committed since say how many of the chain a
    verification would have accepted.
    """

    drafted: int
    accepted: int
    STRATEGY: ClassVar[Strategy] = Strategy("ngram", 15, 1, 15)


class PrefillTime(NamedTuple):
    """The prompt tokens that the target prefilled, and the seconds of all its forwards."""

    num_tokens: int
    num_forwards: int
    seconds: float


class RunningSequence(NamedTuple):
    """A sequence of the running batch. num_left: tokens expected until its end."""

    name: Hashable
    num_left: float


@dataclass(frozen=True)
class BatchState:
    """The running batch, and the versions of policy and drafter: all that a tuner may choose by.

    mean_length: committed tokens per sequence, prompt included.
    num_admitted: sequences that are new in this step; a drafter may have to read their prompts.
    reference_drafts: one for each sequence that has a reference to draft from.
    hindsight: chains of retrieval whose outcome became known since the last step.
    num_left: tokens expected per running sequence, waiting ones' included; None: unknown.
    prefill_time: of the prompts read before this step; None: none was timed.
    sequences: one for each; (): unknown, and they are taken to progress alike.
    """

    num_running: int
    mean_length: float
    policy_version: int
    drafter_version: int
    num_admitted: int = 0
    reference_drafts: tuple[ReferenceDraft, ...] = ()
    hindsight: tuple[Hindsight, ...] = ()
    num_left: float | None = None
    prefill_time: PrefillTime | None = None
    sequences: tuple[RunningSequence, ...] = ()


@dataclass(frozen=True)
class StepOutcome:
    """The tokens and the seconds of one engine step.

    num_tokens: tokens committed by all sequences.
    accepted: accepted drafted tokens by sequence; (): nothing was drafted.
    drafted: drafted nodes by sequence, as many entries as `accepted`.
    seconds: of the whole step, drafting included.
    from_reference: whether a sequence drafted from a reference, by sequence; (): none did.
    drafted_next: the strategy of the drafts that the step made for the next one; None: it made those that it
        verified.
    names: of the sequences of `accepted`, as in `RunningSequence`; (): unknown.
    """

    num_tokens: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float
    from_reference: tuple[bool, ...] = ()
    drafted_next: Strategy | None = None
    names: tuple[Hashable, ...] = ()


class ExpectedSpeeds(NamedTuple):
    """The speeds that a tuner expects of the running batch; None: it predicts nothing."""

    chosen: float | None = None
    """Tokens per second of the strategy that it chose."""
    otherwise: float | None = None
    """Tokens per second of the best choice without references; None also where the chosen one uses none."""


NO_EXPECTATION = ExpectedSpeeds()


class StrategyTuner:
    """Chooses a strategy for every engine step and learns from its outcome. This base learns nothing."""

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
        """Continues from what `counters` returned."""
