"""Keys and values of the running batch, in slots 0..B-1. When a sequence ends, the last one moves into its
slot. Capacity doubles within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.models.decoder import ModelConfig
from tlt.models.kv_budget import BLOCK, MOST_TOKENS, UNBOUNDED, Budget, whole_blocks

T = TypeVar("T")

GROUP_BYTES = 2**28
"""A small cache is one tensor, served by one operation; a large one grows group by group, so that little of
it exists twice."""

MOST_WRITTEN = 512
"""Most tokens of a sequence written at once where earlier ones are read."""

PREFILL_TOKENS = 8192
"""Most tokens of a prefill forward: about 2 GiB of activations at 7B in bf16."""


def prefill_groups(items: Sequence[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Consecutive items for one forward: at most `PREFILL_TOKENS` tokens, or a single item."""
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


def ring_length(window: int) -> int:
    """A part of a prompt or a tree, written at once, overwrites nothing that it sees."""
    return whole_blocks(window + MOST_WRITTEN)


def store(kv_SKLD: Tensor, slot: int, first: int, kv_KTD: Tensor) -> None:
    length = kv_SKLD.shape[2]
    end = first + kv_KTD.shape[1]
    if end <= length:
        kv_SKLD[slot, :, first:end] = kv_KTD
        return
    begin = max(first, end - length)
    columns_T = torch.arange(begin, end, device=kv_SKLD.device) % length
    kv_SKLD[slot, :, columns_T] = kv_KTD[:, begin - first :]


class Cache:
    """`layers[i]` is [slots, 2 × kv heads, length, head dim], keys before values; a view into `groups`.

    A layer with a window is a ring where the cache is longer: position p lies in column p mod its length.
    Entries beyond a sequence's length are finite and unused: rejected drafts, or zeros. num_resizes: after
    each of them the entries lie in other memory.
    """

    def __init__(
        self, config: ModelConfig, num_layers: int, dtype: torch.dtype, device: torch.device, max_slots: int
    ) -> None:
        self.max_slots, self.dtype, self.device = max_slots, dtype, device
        self.rings = [MOST_TOKENS if window is None else ring_length(window) for window in config.windows]
        self.rings = self.rings or [MOST_TOKENS] * num_layers
        self.num_heads, self.head_dim = 2 * config.num_kv_heads, config.head_dim
        self.num_slots, self.capacity, self.num_resizes = 0, BLOCK, 0
        self.groups: list[Tensor] = []
        self.layers: list[Tensor] = []

    def slot_bytes(self, length: int) -> int:
        return sum(self._layer_bytes(min(whole_blocks(length), ring)) for ring in self.rings)

    def _layer_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    def holds(self, num_slots: int, length: int) -> bool:
        return num_slots <= self.num_slots and length <= self.capacity

    def reserve(self, num_slots: int, length: int, budget: Budget = UNBOUNDED) -> None:
        """Growing in length drops unused slots: in the long tail, a few sequences must not hold the memory of
        all that have ended."""
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
        kept, columns = min(self.num_slots, num_slots), min(self.capacity, length)
        self.num_resizes += 1
        self.num_slots, self.capacity = num_slots, length
        old, self.groups = dict(enumerate(self.layers)), []
        layers: dict[int, Tensor] = {}
        for indices in self._indices_of_groups(num_slots, length):
            own_length = min(length, self.rings[indices[0]])
            shape = (len(indices), num_slots, self.num_heads, own_length, self.head_dim)
            group = torch.zeros(shape, dtype=self.dtype, device=self.device)
            for index, layer in zip(indices, group, strict=True):
                if (before := old.pop(index, None)) is not None:
                    layer[:kept, :, :columns] = before[:kept, :, :columns]
                layers[index] = layer
            self.groups.append(group)
        self.layers = [layers[index] for index in range(len(self.rings))]

    def _indices_of_groups(self, num_slots: int, length: int) -> Iterator[list[int]]:
        by_length: dict[int, list[int]] = {}
        for index, ring in enumerate(self.rings):
            by_length.setdefault(min(length, ring), []).append(index)
        for own_length, indices in by_length.items():
            most = max(GROUP_BYTES // self._layer_bytes(num_slots * own_length), 1)
            for first in range(0, len(indices), most):
                yield indices[first : first + most]

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies a prompt shared by its samples to neighbouring slots."""
        if targets:
            first, end = targets[0], targets[-1] + 1
            assert list(targets) == list(range(first, end)), "forks are admitted into neighbouring slots"
            for group in self.groups:
                group[:, first:end, :, :length] = group[:, source, None, :, :length]

    def commit(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves the entries of slot s at starts[s] + paths[s][i] to starts[s] + i: the accepted branch.
        Chains (paths 0, 1, 2, …) cost nothing."""
        # columns rise along a path
        moved = [slot for slot, path in enumerate(paths) if path[-1] != len(path) - 1]
        if not moved:
            return
        longest = max(len(paths[slot]) for slot in moved)
        # entries beyond a shorter path stay in place
        rows = [[slot, starts[slot], *paths[slot], *range(len(paths[slot]), longest)] for slot in moved]
        rows_MP = upload(rows, self.device)
        slots_M1, starts_M1, columns_MP = rows_MP[:, :1], rows_MP[:, 1:2], rows_MP[:, 2:]
        targets_MP = starts_M1 + torch.arange(longest, device=self.device)
        for group in self.groups:
            size = group.shape[3]
            found = group[:, slots_M1, :, (starts_M1 + columns_MP) % size]
            group[:, slots_M1, :, targets_MP % size] = found

    def move(self, source: int, target: int, length: int) -> None:
        for group in self.groups:
            group[:, target, :, :length] = group[:, source, :, :length]

    def copy_out(self, slot: int, length: int) -> list[Tensor]:
        """Returns a copy of a sequence's entries by layer, [heads, at most `length`, head dim]."""
        return [layer[slot, :, :length].clone() for layer in self.layers]

    def copy_in(self, slot: int, entries: Sequence[Tensor]) -> None:
        for layer, own in zip(self.layers, entries, strict=True):
            layer[slot, :, : own.shape[1]] = own

    def release(self) -> None:
        self.num_slots, self.capacity = 0, BLOCK
        self.num_resizes += 1
        self.groups, self.layers = [], []
