"""The bases of drafters, which propose the next tokens of every running sequence as a tree.

The engine keeps its sequences in slots 0..B-1. It tells a drafter when a sequence enters, moves or leaves,
and hands over the target's features of the tokens if the drafter asks for them (`capture`).

    Drafting              what is trained, saved and restored of an engine's drafter, ours or vLLM's
     └─ Drafter           drafts for our engine
         └─ WrappingDrafter   drafts with other drafters
             └─ LentDrafter   with one that learns nothing meanwhile
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, Verdict
from tlt.speculation.law.params import BatchParams
from tlt.speculation.tuner.protocol import Hindsight, ReferenceDraft


@dataclass(frozen=True)
class DraftContext:
    """The running batch as a drafter sees it: row b is the sequence in slot b.

    tokens:   committed tokens per sequence, prompt included; the last one is the root of its tree.
    requests: by row; samples of one prompt share a problem id.
    params:   sampling parameters of the batch.
    device:   of the tree to return.
    """

    tokens: Sequence[Sequence[int]]
    requests: Sequence[Request]
    params: BatchParams
    device: torch.device


class DraftNoise(Protocol):
    """The law's noise of the positions that are drafted for. Level l (0, 1, …) drafts for the position l + 1
    after the root, where the target will draw with the same noise. For a greedy sequence it is 0."""

    def of_level(self, level: int, token_ids_V: Tensor | None = None) -> Tensor:
        """Returns the noise of all tokens, or of `token_ids_V`, at a level: float32[B, V]."""
        ...

    def of_tokens(self, places: Sequence[tuple[int, int, int]]) -> list[float]:
        """Returns the noise of single tokens, each given as (row, level, token), computed on the host."""
        ...


@dataclass(frozen=True)
class Proposal:
    """A drafter's proposal for one step. Subclasses add what `Drafter.observe` needs beside the verdicts.

    references: version of the reference that a row was drafted from, by row; None: none. (): no row has one.
    """

    tree: DraftTree
    references: tuple[int | None, ...] = field(default=(), kw_only=True)

    def drafter_of(self, row: int, strategy: Strategy) -> str:
        """Returns who drafted a row by the proposal's strategy; a drafter made of several says which."""
        return strategy.drafter


P = TypeVar("P", bound=Proposal)


class Drafting:
    """What is trained, saved and restored of an engine's drafter."""

    @property
    def learned(self) -> Any:
        """Returns the learned drafter in it (`Served` in training/publisher.py); None: there is none."""
        return None

    def counters(self) -> dict[str, Any]:
        """Returns what was learned while drafting, as JSON. It affects speed alone."""
        return {}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        """Continues from what `counters` returned before a restart, called before any sequence is admitted.

        counters: of this rank's drafter, then of drafters whose ranks no longer exist.
        """


class Drafter(Drafting, ABC, Generic[P]):
    """Drafts for the engine. Everything but `propose` is optional and does nothing by default."""

    kinds: tuple[str, ...] = ()
    """The names that `Strategy.drafter` may have."""

    @property
    def version(self) -> int:
        """Returns the number of the drafter's updates; statistics about older versions count for less."""
        return 0

    @property
    def capture(self) -> tuple[int, ...]:
        """Returns what `remember` receives of the target at every position: the inputs of these layers. The
        number of layers stands for the final features; () for nothing."""
        return ()

    @abstractmethod
    def propose(
        self,
        context: DraftContext,
        strategy: Strategy,
        noise: DraftNoise,
        unwanted: Sequence[int] = (),
    ) -> P:
        """Returns a tree for each sequence. Ranking candidates with the noise affects speed alone.

        unwanted: rows whose draft will be discarded; nothing is learned from them.
        """

    def observe(self, proposal: P, verdicts: Sequence[Verdict]) -> None:
        """Learns from the verdicts on a proposal, row by row."""

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        """Returns a draft for each of these sequences, given by slot, that has a reference: a response drawn
        before with the same noise."""
        return ()

    def hindsight(self, tokens: Sequence[Sequence[int]]) -> tuple[Hindsight, ...]:
        """Returns the outcomes of chains that retrieval would have drafted while it was not asked to, each
        once, as soon as the committed tokens decide it. Drafters without retrieval return ()."""
        return ()

    def admit(self, slot: int, request: Request) -> None:
        """Starts a new sequence in this slot; what the slot held is forgotten."""

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Keeps the target's features of T positions from starts[b] on. Rejected drafts may be among them:
        they lie beyond the committed tokens and are overwritten before anything reads them."""

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        """Returns the features of the first `num_positions` positions of this slot, [T, F]; None where the
        drafter does not hold all of them."""
        return None

    def move(self, source: int, target: int) -> None:
        """Moves a sequence from one slot to another."""

    def finish(self, slot: int, rollout: Rollout) -> None:
        """Ends the response in this slot."""

    def withdraw(self, slot: int) -> None:
        """Gives up this slot: its sequence leaves in the middle of its response."""

    def slot_bytes(self, length: int) -> int:
        """Returns the bytes of the drafter's caches for a sequence with room for `length` tokens."""
        return 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Bounds the drafter's caches to `num_slots` sequences of `length` tokens: engine and drafter share
        one memory budget."""

    def release(self) -> None:
        """Gives back the memory of sequences: nothing is running any more."""


class NoDrafter(Drafter[Proposal]):
    """Drafts nothing, and remembers nothing: an engine's drafter until one is loaded."""

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, unwanted: Sequence[int] = ()
    ) -> Proposal:
        raise AssertionError(f"no drafter is loaded, so {strategy} cannot be used")


class WrappingDrafter(Drafter[P]):
    """Drafts with other drafters, its `parts`; forwards every call but `propose` and `observe` to them."""

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


class LentDrafter(WrappingDrafter[Any]):
    """Drafts with another drafter, which learns neither from verdicts nor from responses meanwhile. Retrieval
    keeps their texts, as further samples of their prompts, and still judges itself in hindsight."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        super().__init__(drafter)
        self.inner, self.kinds = drafter, drafter.kinds

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, unwanted: Sequence[int] = ()
    ) -> Any:
        return self.inner.propose(context, strategy, noise, unwanted)

    def finish(self, slot: int, rollout: Rollout) -> None:
        self.inner.withdraw(slot)
