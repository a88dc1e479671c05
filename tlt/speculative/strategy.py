"""Strategies of speculation, the state that a tuner chooses by, and the base of tuners. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tlt.types import UserError


@dataclass(frozen=True)
class Strategy:
    """A way to speculate. `Strategy.OFF` decodes without drafts.

    drafter: learned, ngram, hybrid, ahead (from references) or ahead+KIND (KIND where there is no reference).
    depth: drafting steps, one per level: the depth of the deepest node (`DraftTree` counts depths).
    width: candidates per node.
    budget: most drafted nodes. The root, which is the last committed token, is not counted.
    """

    drafter: str
    depth: int
    width: int
    budget: int

    OFF: ClassVar[Strategy]
    MAX_DEPTH: ClassVar[int] = 32
    """Most drafting steps of a drafter."""
    MAX_REFERENCE: ClassVar[int] = 256
    """Most tokens that are drafted from a reference in a step."""
    WITHOUT_REFERENCE: ClassVar[int] = 8
    """Most tokens that a sequence without a reference drafts in a step in which others use one."""

    def __post_init__(self) -> None:
        limit = self.MAX_REFERENCE if self.uses_references else self.MAX_DEPTH
        if self.depth > limit:
            raise UserError(f"strategy {self}: depth {self.depth} is too large; give at most {limit}")
        if self.uses_references and self.width > 1:
            raise UserError(
                f"strategy {self}: a reference is a chain; give {self.drafter}:{self.depth}x1x{self.depth}"
            )
        if self.depth < 0 or self.width < 0 or self.budget < 0:
            raise UserError(f"strategy {self}: depth, width and budget must not be negative")
        if self.depth and not (self.width >= 1 and self.depth <= self.budget):
            chain = f"{self.depth}x1x{self.depth}"
            raise UserError(f"strategy {self}: needs width >= 1 and budget >= depth; for a chain use {chain}")

    @property
    def is_off(self) -> bool:
        return self.depth == 0

    @property
    def uses_references(self) -> bool:
        return self.drafter.partition("+")[0] == "ahead"

    @property
    def without_reference(self) -> Strategy:
        """Returns the strategy of this step's sequences that have no reference."""
        if not self.uses_references:
            return self
        kind, depth = self.drafter.partition("+")[2], min(self.depth, self.WITHOUT_REFERENCE)
        return Strategy(kind, depth, 1, depth) if kind else Strategy.OFF

    def __str__(self) -> str:
        return "off" if self.is_off else f"{self.drafter}:{self.depth}x{self.width}x{self.budget}"

    @staticmethod
    def parse(text: str, drafter: str = "learned") -> Strategy:
        """Reads `off`, `DEPTHxWIDTHxBUDGET` or `DRAFTER:DEPTHxWIDTHxBUDGET`; `drafter` is the default."""
        if text == "off":
            return Strategy.OFF
        name, _, shape = text.rpartition(":")
        parts = shape.split("x")
        if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
            raise UserError(
                f"speculation: {text!r} is no strategy; give off, adaptive or DEPTHxWIDTHxBUDGET such as "
                "4x1x4"
            )
        depth, width, budget = map(int, parts)
        return Strategy(name or drafter, depth, width, budget)


Strategy.OFF = Strategy("none", 0, 0, 0)


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
