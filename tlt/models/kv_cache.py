"""Keys and values of the running sequences, one slot each. Storage only: it knows no model and no schedule.

The running batch lies in slots 0..B-1. When a sequence ends, the last one moves into its slot; nothing else is copied.
Capacity grows by doubling, so that a short run stays small; growing is the only time the cache is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tlt.models.decoder import ModelConfig

T = TypeVar("T")

_BLOCK = 128
"""A slot's length grows in multiples of so many tokens."""

_PREFILL_TOKENS = 8192
"""Bound on a forward that fills the cache: prompts are short, but responses that come from other engines need not be."""


def prefill_groups(items: Sequence[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the items, in order, in groups for one forward each: of at most `_PREFILL_TOKENS` tokens, or a single item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + num_tokens(item) > _PREFILL_TOKENS:
            yield group
            group, total = [], 0
        group.append(item)
        total += num_tokens(item)
    if group:
        yield group


class Cache:
    """Storage whose `layers[i]` is [slots, 2 × kv heads, length, head dim], keys before values. Entries beyond a sequence's
    length are finite but mean nothing: rejected drafts, or zeros."""

    def __init__(self, config: ModelConfig, num_layers: int, dtype: torch.dtype, device: torch.device, max_slots: int) -> None:
        self.max_slots = max_slots
        heads, dim = 2 * config.num_kv_heads, config.head_dim
        self.storage_ISKLD = torch.zeros(num_layers, 0, heads, _BLOCK, dim, dtype=dtype, device=device)
        self.layers: list[Tensor] = []

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for the `num_slots` running sequences, the longest of `length` tokens. Growing in length gives up the
        other slots: it happens in the long tail, where a few sequences would pay for the memory of all that have ended."""
        _, slots, _, capacity, _ = self.storage_ISKLD.shape
        if num_slots <= slots and length <= capacity:
            return
        assert num_slots <= self.max_slots, f"{num_slots} slots wanted of {self.max_slots}"
        if length > capacity:
            new_slots, new_length = num_slots, max(-(-length // _BLOCK) * _BLOCK, 2 * capacity)
        else:
            new_slots, new_length = min(max(num_slots, 2 * slots), self.max_slots), capacity
        layers, _, heads, _, dim = self.storage_ISKLD.shape
        grown = self.storage_ISKLD.new_zeros(layers, new_slots, heads, new_length, dim)
        kept = min(slots, num_slots)
        grown[:, :kept, :, :capacity] = self.storage_ISKLD[:, :kept]
        self.storage_ISKLD = grown
        self.layers = list(grown)

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first `length` entries of one slot to others, which must be neighbours: a prompt shared by its samples."""
        if targets:
            first, last = targets[0], targets[-1] + 1
            assert list(targets) == list(range(first, last)), "forks are admitted into neighbouring slots"
            self.storage_ISKLD[:, first:last, :, :length] = self.storage_ISKLD[:, source, None, :, :length]

    def commit(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Moves the entries at start + path[i] to start + i: the accepted branch of a draft tree closes up behind the sequence.
        A path 0, 1, 2, … (a chain always is one) costs nothing."""
        if any(column != i for i, column in enumerate(path)):
            columns = torch.tensor(path, device=self.storage_ISKLD.device) + start
            kept = self.storage_ISKLD[:, slot].index_select(2, columns)
            self.storage_ISKLD[:, slot, :, start : start + len(path)] = kept

    def move(self, source: int, target: int, length: int) -> None:
        self.storage_ISKLD[:, target, :, :length] = self.storage_ISKLD[:, source, :, :length]

    def release(self) -> None:
        """Gives the memory back; the next `reserve` starts anew."""
        self.storage_ISKLD = self.storage_ISKLD[:, :0, :, :_BLOCK].clone()
        self.layers = []
