"""The bases of drafters, which propose candidates for the next tokens as a tree; how is theirs.

The engine keeps its sequences in slots 0..B-1. A drafter with state per slot is told when a sequence enters,
moves or has grown; it learns the target's features of committed tokens if it wants them.

    Drafting          what an engine drafts with, as those see it who train it and keep what it has learned
     └─ Drafter           drafts for our engine: says its kinds, proposes, and overrides what concerns it
         └─ WrappingDrafter   asks other drafters, and keeps all of them informed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tlt.speculative.params import BatchParams
from tlt.speculative.strategy import Hindsight, ReferenceDraft, Strategy
from tlt.types import DraftTree, Request, Rollout, Verdict


@dataclass(frozen=True)
class DraftContext:
    """The running batch as a drafter sees it: row b is the sequence in slot b.

    tokens:   committed tokens per sequence, prompt included; the last one is the root of its tree.
    requests: whose sequences they are (siblings share a problem id).
    params:   sampling parameters of the batch.
    vocab_size: tokens of the target are below it.
    device:   where the tree is wanted.
    """

    tokens: Sequence[Sequence[int]]
    requests: Sequence[Request]
    params: BatchParams
    vocab_size: int
    device: torch.device


class DraftNoise(Protocol):
    """The law's noise of the positions that are drafted for, made where it is asked for. A token at depth
    d is drafted for the position d + 1 after the root, where the target will draw with this noise. A
    greedy sequence has none: zeros."""

    def of_depth(self, depth: int, token_ids_V: Tensor | None = None) -> Tensor:
        """Returns float32[B, V]: of every token, or of these alone."""
        ...

    def of_tokens(self, places: Sequence[tuple[int, int, int]]) -> list[float]:
        """Returns that of single tokens, each given as (row, depth, token). On the host: nothing waits for
        a device."""
        ...


@dataclass(frozen=True)
class Proposal:
    """Holds what a drafter proposes for one step. A drafter adds what it wants back together with the
    verdicts.

    references: by row, the policy version of the reference that it was drafted from, or where else it
        comes from; None: from none. (): no row was.
    """

    tree: DraftTree
    references: tuple[int | str | None, ...] = field(default=(), kw_only=True)


P = TypeVar("P", bound=Proposal)


class Drafting:
    """Holds what an engine drafts with, for those who train it and keep what it has learned."""

    @property
    def learned(self) -> Any:
        """The learned drafter in it (`Served` in drafter/publisher.py); None: there is none."""
        return None

    def counters(self) -> dict[str, Any]:
        """Returns what was learned while drafting, as JSON. Without it drafts are only worse for a while."""
        return {}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        """Takes up what `counters` returned before a restart: first of the drafter that this one goes on for,
        then of others whose ranks are no more. It is called before anything is admitted."""


class Drafter(Drafting, ABC, Generic[P]):
    """Drafts for the engine. Everything but `propose` is optional, and does nothing by default.

    kinds: the names that `Strategy.drafter` may have.
    """

    kinds: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Counts the drafter's own updates; statistics about older versions age."""
        return 0

    @property
    def capture(self) -> tuple[int, ...]:
        """Says what `remember` is to receive of the target at every position: the inputs of these layers,
        or (the number of layers) the features; () where it does not matter."""
        return ()

    @abstractmethod
    def propose(
        self,
        context: DraftContext,
        strategy: Strategy,
        noise: DraftNoise,
        unwanted: Sequence[int] = (),
    ) -> P:
        """Returns a tree for each sequence. Candidates may be ranked with the noise, for speed alone.

        unwanted: rows that will draft otherwise; what they hold is of no use, and nothing is learned from it.
        """

    def observe(self, proposal: P, verdicts: Sequence[Verdict]) -> None:
        """Takes note of what became of a proposal, row by row: how far the drafter can trust itself."""

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        """Returns what can be drafted from references, responses drawn before with the same noise, for
        those of these sequences, by slot, that have one."""
        return ()

    def hindsight(self, tokens: Sequence[Sequence[int]]) -> tuple[Hindsight, ...]:
        """Returns the chains that retrieval would have drafted, one after the other, for some of these
        sequences while it was not asked to: each once, as soon as what came tells how much of it was
        right. (): none, or nothing retrieves."""
        return ()

    def admit(self, slot: int, request: Request) -> None:
        """A new sequence starts in this slot; whatever the slot held is forgotten."""

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Takes note of what was captured of the target at T positions from starts[b] on. Rejected drafts may
        be among them: they lie beyond the committed tokens and are overwritten before anything reads them."""

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        """Returns what `remember` received of the first `num_positions` positions of this slot, [T, F];
        None where the drafter does not hold all of it."""
        return None

    def move(self, source: int, target: int) -> None:
        """The sequence of one slot continues in another."""

    def finish(self, slot: int, rollout: Rollout) -> None:
        """The response in this slot has ended."""

    def withdraw(self, slot: int) -> None:
        """The sequence in this slot leaves for another engine in the middle of its response."""

    def slot_bytes(self, length: int) -> int:
        """Returns the bytes that its caches take on the device for a sequence with room for `length`
        tokens."""
        return 0

    def reserve(self, num_slots: int, length: int) -> None:
        """The engine has room for so many sequences of so many tokens from now on. Caches of its own may
        grow to that, but no further, or a memory that is shared by all of them is exceeded."""

    def release(self) -> None:
        """Nothing is running any more: memory of running sequences may be given back."""


class WrappingDrafter(Drafter[P]):
    """Drafts with other drafters, its `parts`: forwards all but proposals and verdicts to every part."""

    def __init__(self, *parts: Drafter[Any]) -> None:
        self.parts = parts

    @property
    def learned(self) -> Any:
        return next((part.learned for part in self.parts if part.learned is not None), None)

    @property
    def version(self) -> int:
        return sum(part.version for part in self.parts)

    @property
    def capture(self) -> tuple[int, ...]:
        return tuple(layer for part in self.parts for layer in part.capture)

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        return tuple(one for part in self.parts for one in part.reference_drafts(tokens))

    def hindsight(self, tokens: Sequence[Sequence[int]]) -> tuple[Hindsight, ...]:
        return tuple(one for part in self.parts for one in part.hindsight(tokens))

    def admit(self, slot: int, request: Request) -> None:
        for part in self.parts:
            part.admit(slot, request)

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        for part in self.parts:
            part.remember(slots, starts, features_BTF)

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        found = (part.recall(slot, num_positions) for part in self.parts)
        return next((captured_TF for captured_TF in found if captured_TF is not None), None)

    def move(self, source: int, target: int) -> None:
        for part in self.parts:
            part.move(source, target)

    def finish(self, slot: int, rollout: Rollout) -> None:
        for part in self.parts:
            part.finish(slot, rollout)

    def withdraw(self, slot: int) -> None:
        for part in self.parts:
            part.withdraw(slot)

    def slot_bytes(self, length: int) -> int:
        return sum(part.slot_bytes(length) for part in self.parts)

    def reserve(self, num_slots: int, length: int) -> None:
        for part in self.parts:
            part.reserve(num_slots, length)

    def release(self) -> None:
        for part in self.parts:
            part.release()
