"""How many sequences of how many tokens fit into the caches' memory.

    slots × [ keys and values │ the drafter's pairs │ the drafter's features ]  ≤  max_bytes

Every running sequence has room for as many tokens as the longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 128
"""Tokens by which a slot grows."""

MOST_TOKENS = 1 << 24


def whole_blocks(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


@dataclass(frozen=True)
class Budget:
    """slot_bytes: tokens → bytes of a sequence. max_bytes None: unbounded."""

    max_bytes: int | None
    slot_bytes: Callable[[int], int]

    def fits(self, num_slots: int, length: int) -> bool:
        return self.max_bytes is None or num_slots * self.slot_bytes(length) <= self.max_bytes

    def max_slots(self, length: int) -> int:
        return MOST_TOKENS if self.max_bytes is None else max(self.max_bytes // self.slot_bytes(length), 1)

    def max_length(self, num_slots: int) -> int:
        if self.max_bytes is None:
            return MOST_TOKENS
        lengths = range(BLOCK, MOST_TOKENS, BLOCK)
        return BLOCK * bisect_right(lengths, self.max_bytes, key=lambda n: num_slots * self.slot_bytes(n))


UNBOUNDED = Budget(None, lambda length: 0)
