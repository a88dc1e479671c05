"""Keys and values of the running sequences, one slot each.

The running batch is in slots 0..B-1. When a sequence ends, the last one moves into its slot; nothing else is
copied. Capacity doubles within a budget, so that a short run stays small. Growing copies the cache, a group
of layers at a time, so that little of it exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.models.decoder import ModelConfig
from tlt.models.kv_budget import BLOCK, UNBOUNDED, Budget, whole_blocks

T = TypeVar("T")

GROUP_BYTES = 2**28
"""Largest bytes of a tensor of several layers: one operation serves a small cache whole, and a large one
grows group by group."""

PREFILL_TOKENS = 8192
"""Largest number of tokens of a prefill forward. It bounds the activations: about 2 GiB at 7B in bf16."""


def prefill_groups(items: Sequence[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the items in order, in groups for one forward each: at most `PREFILL_TOKENS` tokens, or a single
    item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + num_tokens(item) > PREFILL_TOKENS:
            yield group
            group, total = [], 0
        group.append(item)
        total += num_tokens(item)
    if group:
        yield group


class Cache:
    """Keys and values: `layers[i]` is [slots, 2 × kv heads, length, head dim], keys before values. Entries
    beyond a sequence's length are finite and unused: rejected drafts, or zeros.

    groups: the tensors that `layers` are views of: [neighbouring layers, slots, 2 × kv heads, length, head
        dim].
    """

    def __init__(
        self, config: ModelConfig, num_layers: int, dtype: torch.dtype, device: torch.device, max_slots: int
    ) -> None:
        self.num_layers, self.max_slots, self.dtype, self.device = num_layers, max_slots, dtype, device
        self.num_heads, self.head_dim = 2 * config.num_kv_heads, config.head_dim
        self.num_slots, self.capacity = 0, BLOCK
        self.groups: list[Tensor] = []
        self.layers: list[Tensor] = []

    def slot_bytes(self, length: int) -> int:
        """Returns the bytes of a slot with room for `length` tokens."""
        return self.num_layers * self._layer_bytes(whole_blocks(length))

    def _layer_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    def holds(self, num_slots: int, length: int) -> bool:
        """Returns whether `num_slots` sequences of `length` tokens have room without growing."""
        return num_slots <= self.num_slots and length <= self.capacity

    def reserve(self, num_slots: int, length: int, budget: Budget = UNBOUNDED) -> None:
        """Makes room for the `num_slots` running sequences, the longest of `length` tokens. Growth doubles
        slots or length within the budget. Growing in length drops unused slots: in the long tail, few
        sequences need not hold the memory of all that have ended."""
        if self.holds(num_slots, length):
            return
        assert num_slots <= self.max_slots, f"{num_slots} slots wanted of {self.max_slots}"
        needed = whole_blocks(length)
        if length > self.capacity:
            self.resize(num_slots, max(needed, min(2 * self.capacity, budget.max_length(num_slots))))
            return
        capacity = max(needed, min(self.capacity, budget.max_length(num_slots)))
        ahead = min(2 * self.num_slots, self.max_slots, budget.max_slots(capacity))
        self.resize(max(num_slots, ahead), capacity)

    def resize(self, num_slots: int, length: int) -> None:
        """Allocates `num_slots` slots of `length` tokens; entries within old and new size stay."""
        kept, columns = min(self.num_slots, num_slots), min(self.capacity, length)
        self.num_slots, self.capacity = num_slots, length
        per_group = max(GROUP_BYTES // self._layer_bytes(num_slots * length), 1)
        old, self.groups, self.layers = self.layers[::-1], [], []
        while (missing := self.num_layers - len(self.layers)) > 0:
            shape = (min(per_group, missing), num_slots, self.num_heads, length, self.head_dim)
            group = torch.zeros(shape, dtype=self.dtype, device=self.device)
            for layer in group:
                if old:
                    layer[:kept, :, :columns] = old.pop()[:kept, :, :columns]
            self.groups.append(group)
            self.layers += group

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first `length` entries of a slot, a prompt shared by its samples, to neighbouring
        slots."""
        if targets:
            first, end = targets[0], targets[-1] + 1
            assert list(targets) == list(range(first, end)), "forks are admitted into neighbouring slots"
            for group in self.groups:
                group[:, first:end, :, :length] = group[:, source, None, :, :length]

    def commit(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves the entries of slot s at starts[s] + paths[s][i] to starts[s] + i: the accepted branch of a
        draft tree directly behind its sequence. Paths 0, 1, 2, … (every chain) cost nothing; all others move
        in one operation."""
        # columns rise along a path
        moved = [slot for slot, path in enumerate(paths) if path[-1] != len(path) - 1]
        if not moved:
            return
        longest = max(len(paths[slot]) for slot in moved)
        # what lies beyond a shorter path stays where it is
        rows = [[slot, starts[slot], *paths[slot], *range(len(paths[slot]), longest)] for slot in moved]
        rows_MP = upload(rows, self.device)
        slots_M1, starts_M1, columns_MP = rows_MP[:, :1], rows_MP[:, 1:2], rows_MP[:, 2:]
        targets_MP = starts_M1 + torch.arange(longest, device=self.device)
        for group in self.groups:
            group[:, slots_M1, :, targets_MP] = group[:, slots_M1, :, starts_M1 + columns_MP]

    def move(self, source: int, target: int, length: int) -> None:
        for group in self.groups:
            group[:, target, :, :length] = group[:, source, :, :length]

    def release(self) -> None:
        """Frees the memory; the next `reserve` starts empty."""
        self.num_slots, self.capacity = 0, BLOCK
        self.groups, self.layers = [], []
