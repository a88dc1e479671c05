"""A drafter promises the engine trees of next tokens.

    Drafting              state that is trained, saved and restored, with our engine or vLLM
     └─ Drafter           drafts for our engine
         └─ WrappingDrafter   drafts with other drafters
             └─ LentDrafter   with one that learns nothing meanwhile

The engine tells a drafter when a sequence enters, moves or leaves a slot.
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
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.tuner.protocol import ReferenceDraft


@dataclass(frozen=True)
class DraftContext:
    """Row b is the sequence in slot b.

    tokens:   committed tokens per sequence, prompt included; the last one is the root of its tree.
    """

    tokens: Sequence[Sequence[int]]
    requests: Sequence[Request]
    params: BatchParams
    device: torch.device


class DraftNoise(Protocol):
    """The law's noise, with which the target will draw. Level l drafts position l + 1 after the root. Greedy
    sequences have noise 0.

    law: of level 0, for a recorded or compiled draft; None: neither can be made.
    """

    @property
    def law(self) -> Law | None: ...

    def of_level(self, level: int, token_ids_V: Tensor | None = None) -> Tensor:
        """float32[B, V], of all tokens or `token_ids_V`."""
        ...

    def of_tokens(self, places: Sequence[tuple[int, int, int]]) -> list[float]:
        """places: (row, level, token). Computed on the host."""
        ...


@dataclass(frozen=True)
class Proposal:
    """The trees of one step; subclasses add what `Drafter.observe` needs.

    references: by row, the version of the reference drafted from, or None. (): no row has one.
    """

    tree: DraftTree
    references: tuple[int | None, ...] = field(default=(), kw_only=True)

    def drafter_of(self, row: int, strategy: Strategy) -> str:
        """A composite drafter names the part that drafted the row."""
        return strategy.drafter


P = TypeVar("P", bound=Proposal)


class Drafting:
    @property
    def learned(self) -> Any:
        """The drafter that a run trains, if any."""
        return None

    def counters(self) -> dict[str, Any]:
        """Learned state, which affects speed alone, as JSON."""
        return {}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        """Called before any sequence is admitted. counters: this rank's, then those of ranks that no longer
        exist."""


class Drafter(Drafting, ABC, Generic[P]):
    kinds: tuple[str, ...] = ()
    """Possible names of `Strategy.drafter`."""

    @property
    def version(self) -> int:
        """Number of updates; statistics about older versions count for less."""
        return 0

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers whose inputs `remember` receives (`DrafterShape.capture`)."""
        return ()

    @abstractmethod
    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> P:
        """discarded: rows that verify another drafter's draft; `observe` gets its verdicts for them."""

    def observe(self, proposal: P, verdicts: Sequence[Verdict]) -> None:
        """Learns from the verdicts, row by row."""

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        """Drafts for sequences with a reference (references.py)."""
        return ()

    def admit(self, slot: int, request: Request) -> None:
        """Starts a sequence; the slot's previous one is forgotten."""

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Stores features of T positions from starts[b] on; those of rejected drafts are overwritten before
        they are read."""

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        """[T, F]; None if any position is missing."""
        return None

    def move(self, source: int, target: int) -> None:
        """Moves a sequence."""

    def park(self, slot: int, num_positions: int) -> Any:
        """Returns what `unpark` needs. The sequence leaves its slot by `finish`."""

    def unpark(self, slot: int, request: Request, parked: Any) -> None:
        self.admit(slot, request)

    def finish(self, slot: int, rollout: Rollout) -> None:
        """Ends a response, or one of its turns."""

    def withdraw(self, slot: int) -> None:
        """Ends an unfinished response."""

    def slot_bytes(self, length: int) -> int:
        """Cache bytes of `length` tokens."""
        return 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Engine and drafter share a memory budget."""

    def release(self) -> None:
        """Frees the caches; nothing is running."""


class NoDrafter(Drafter[Proposal]):
    """An engine's drafter until one is loaded."""

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> Proposal:
        raise AssertionError(f"no drafter is loaded, so {strategy} cannot be used")


class WrappingDrafter(Drafter[P]):
    """Forwards all but `propose` and `observe` to its parts."""

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

    def park(self, slot: int, num_positions: int) -> tuple[Any, ...]:
        return tuple(part.park(slot, num_positions) for part in self.parts)

    def unpark(self, slot: int, request: Request, parked: tuple[Any, ...]) -> None:
        for part, own in zip(self.parts, parked, strict=True):
            part.unpark(slot, request, own)

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
    """The lent drafter does not learn meanwhile, except that retrieval keeps the responses' texts."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        super().__init__(drafter)
        self.inner, self.kinds = drafter, drafter.kinds

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> Any:
        return self.inner.propose(context, strategy, noise, discarded)

    def finish(self, slot: int, rollout: Rollout) -> None:
        self.inner.withdraw(slot)
