"""The base of a learned drafter's caches, by the engine's slots.

    committed tokens ─▶ read what is new ─▶ Levels:  first() ─▶ next(tokens of level 1) ─▶ …
                        (cache, history)

A proposal first reads new committed tokens, up to the window when speculation is switched on late. The target
never runs for this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.drafter.drafting.learned.feature_history import FeatureHistory
from tlt.drafter.model import PackedDrafter
from tlt.drafter.protocol import DraftContext
from tlt.models.graphs import Graphs, Outputs
from tlt.models.kv_cache import Cache
from tlt.models.target import Target
from tlt.speculation.law.params import Law


class Levels(ABC):
    """The logits of one proposal, over the draft vocabulary. F: nodes to be expanded."""

    @abstractmethod
    def first(self) -> Tensor:
        """Returns the logits [B, 1, V] behind the root."""

    @abstractmethod
    def next(self, tokens_BF: Tensor, parents_BF: Tensor | None) -> Tensor:
        """Returns the logits [B, F, V] behind `tokens_BF`. parents_BF: among the nodes expanded last; None: a
        chain's only node."""


@dataclass(frozen=True)
class ParkedDraft:
    features_CF: Tensor
    """The target's, by column of the history's ring."""
    first: int
    """Position of the first entry."""
    count: int
    """Entries that the drafter's cache had."""
    entries: list[Tensor]
    """The drafter's keys and values, by layer."""
    num_loads: int
    """Loads of the drafter's weights before the entries were computed: later weights make others."""


class DraftCache(ABC):
    """captured_size: width of a position's features, those for training included.
    window: positions per sequence whose features are kept.
    spare: columns behind a sequence's entries, for the drafts.
    least: entries from which on `restart` reads a sequence.
    """

    def __init__(
        self,
        model: PackedDrafter,
        target: Target,
        captured_size: int,
        window: int,
        max_slots: int,
        spare: int,
        least: int,
    ) -> None:
        self.model, self.target, self.spare, self.least = model, target, spare, least
        layer = model.config.layer
        self.cache = Cache(layer, layer.num_layers, model.dtype, model.device, max_slots)
        self.history = FeatureHistory(captured_size, window, max_slots, model.dtype, model.device)
        self.room: tuple[int, int] | None = None  # slots and tokens of the engine's cache; None: unknown
        self.graphs = Graphs(model.device)
        self.firsts = [0] * max_slots  # position of the entry in column 0
        self.counts = [0] * max_slots  # entries in the cache

    @abstractmethod
    def begin(self, context: DraftContext, strategy: Strategy, roots_B1: Tensor) -> Levels:
        """roots_B1: the last committed tokens."""

    def draft_chain(
        self, context: DraftContext, law: Law, tau: float, depth: int
    ) -> tuple[Tensor, Tensor] | None:
        """As `CompiledChain.draft`; None: a chain is drafted level by level."""
        return None

    def admit(self, slot: int) -> None:
        self.firsts[slot] = self.counts[slot] = 0

    def forget(self) -> None:
        self.counts = [0] * len(self.counts)

    def move(self, source: int, target: int) -> None:
        self.firsts[target], self.counts[target] = self.firsts[source], self.counts[source]
        self.history.move(source, target)
        if self.counts[source]:
            self.cache.move(source, target, self.counts[source])

    def park(self, slot: int, num_positions: int) -> ParkedDraft:
        count = self.counts[slot]
        entries = self.cache.copy_out(slot, count) if count else []
        features_CF = self.history.copy_out(slot, num_positions)
        return ParkedDraft(features_CF, self.firsts[slot], count, entries, self.model.num_loads)

    def unpark(self, slot: int, parked: ParkedDraft) -> None:
        self.history.copy_in(slot, parked.features_CF)
        self.firsts[slot], self.counts[slot] = parked.first, 0
        if parked.count and parked.num_loads == self.model.num_loads:
            self.hold(slot + 1, parked.count)
            self.cache.copy_in(slot, parked.entries)
            self.counts[slot] = parked.count

    def slot_bytes(self, length: int) -> int:
        return self.cache.slot_bytes(length + self.spare) + self.history.slot_bytes(length)

    def reserve(self, num_slots: int, length: int) -> None:
        self.room = num_slots, length
        self.history.reserve(num_slots, length)
        slots = min(self.cache.num_slots, num_slots)
        columns = min(self.cache.capacity, length + self.spare)
        if slots and (slots, columns) != (self.cache.num_slots, self.cache.capacity):
            self.cache.resize(slots, columns)

    def release(self) -> None:
        self.room = None
        self.cache.release()
        self.history.release()

    def hold(self, num_slots: int, num_columns: int) -> None:
        if self.room is None:
            self.cache.reserve(num_slots, num_columns)
        elif not self.cache.holds(num_slots, num_columns):
            slots, length = self.room
            self.cache.resize(max(slots, num_slots), max(length + self.spare, num_columns))

    def record(
        self, key: Hashable, function: Callable[..., Outputs], inputs: Mapping[str, Tensor]
    ) -> Outputs:
        target = self.target
        addresses = target.embedding_VE.data_ptr(), target.head_VE.data_ptr()
        self.graphs.keep_to((*addresses, target.version, self.model.num_loads, self.cache.num_resizes))
        return self.graphs.run(key, function, inputs, self.cache.num_slots)

    def restart(self, context: DraftContext) -> tuple[list[int], list[tuple[int, int]]]:
        """Forgets sequences whose next entry has left the window. Returns the slots to read anew, and
        (leader, slot) of samples of one prompt, which share entries."""
        entering: list[int] = []
        copies: list[tuple[int, int]] = []
        leader_of: dict[tuple[int, ...], int] = {}
        for slot, (tokens, request) in enumerate(zip(context.tokens, context.requests, strict=True)):
            known = len(tokens) - 1
            if self.firsts[slot] + self.counts[slot] < self.history.first_known(known):
                self.firsts[slot], self.counts[slot] = self.history.first_known(known), 0
            if self.counts[slot] or known - self.firsts[slot] < self.least:
                continue
            is_prompt = len(tokens) == len(request.prompt_ids)
            if is_prompt and (leader := leader_of.setdefault(request.prompt_ids, slot)) != slot:
                copies.append((leader, slot))
            else:
                entering.append(slot)
        return entering, copies

    def share(self, copies: list[tuple[int, int]]) -> None:
        for leader, slot in copies:
            self.cache.move(leader, slot, self.counts[leader])
            self.firsts[slot], self.counts[slot] = self.firsts[leader], self.counts[leader]

    def positions(self, columns_BT: Tensor, offsets_B1: Tensor | None) -> Tensor:
        positions_BT = columns_BT if offsets_B1 is None else columns_BT + offsets_B1
        return positions_BT.flatten().clamp_max(self.model.config.layer.max_positions - 1)
