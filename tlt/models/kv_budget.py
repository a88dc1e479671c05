"""How many sequences of how many tokens fit into a memory: the arithmetic of the caches. Knows no tensor and
no schedule.

    slots × [ keys and values │ the drafter's pairs │ the drafter's features ]  ≤  max_bytes

Caches are rectangles: every running sequence has room for as many tokens as the longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 128
"""A slot's length grows in multiples of so many tokens."""

MOST_TOKENS = 1 << 24
"""No window is as long."""


def whole_blocks(length: int) -> int:
    """Returns the tokens that a slot has room for where `length` are needed."""
    return -(-length // BLOCK) * BLOCK


@dataclass(frozen=True)
class Budget:
    """Bounds what the running sequences take in all caches together.

    max_bytes: None: without a bound.  slot_bytes: bytes of a sequence that has room for so many tokens.
    """

    max_bytes: int | None
    slot_bytes: Callable[[int], int]

    def fits(self, num_slots: int, length: int) -> bool:
        return self.max_bytes is None or num_slots * self.slot_bytes(length) <= self.max_bytes

    def max_slots(self, length: int) -> int:
        """Returns how many sequences of `length` tokens fit; one always gets its room."""
        return MOST_TOKENS if self.max_bytes is None else max(self.max_bytes // self.slot_bytes(length), 1)

    def max_length(self, num_slots: int) -> int:
        """Returns to how many tokens so many sequences can grow, in whole blocks."""
        if self.max_bytes is None:
            return MOST_TOKENS
        blocks = range(1, MOST_TOKENS // BLOCK)
        return BLOCK * bisect_right(
            blocks, self.max_bytes, key=lambda n: num_slots * self.slot_bytes(n * BLOCK)
        )


UNBOUNDED = Budget(None, lambda length: 0)
