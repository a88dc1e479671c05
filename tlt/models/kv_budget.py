"""The arithmetic of the caches: how many sequences of how many tokens fit into a memory.

    slots × [ keys and values │ the drafter's pairs │ the drafter's features ]  ≤  max_bytes

Caches are rectangles: every running sequence has room for as many tokens as the longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 128
"""A slot's length is a multiple of this number of tokens."""

MOST_TOKENS = 1 << 24
"""More than any window."""


def whole_blocks(length: int) -> int:
    """Returns the length rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


@dataclass(frozen=True)
class Budget:
    """Bounds the bytes of the running sequences in all caches together.

    max_bytes: the bound; None: unbounded.
    slot_bytes: returns the bytes of a sequence with room for a number of tokens.
    """

    max_bytes: int | None
    slot_bytes: Callable[[int], int]

    def fits(self, num_slots: int, length: int) -> bool:
        return self.max_bytes is None or num_slots * self.slot_bytes(length) <= self.max_bytes

    def max_slots(self, length: int) -> int:
        """Returns how many sequences of `length` tokens fit, at least one."""
        return MOST_TOKENS if self.max_bytes is None else max(self.max_bytes // self.slot_bytes(length), 1)

    def max_length(self, num_slots: int) -> int:
        """Returns the largest length, in whole blocks, of which `num_slots` sequences fit."""
        if self.max_bytes is None:
            return MOST_TOKENS
        lengths = range(BLOCK, MOST_TOKENS, BLOCK)
        return BLOCK * bisect_right(lengths, self.max_bytes, key=lambda n: num_slots * self.slot_bytes(n))


UNBOUNDED = Budget(None, lambda length: 0)
