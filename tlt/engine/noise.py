"""The law's noise for the running batch, computed ahead in blocks: one call per sequence and block instead of one per token.

A block is a pure function of (key, position), so computing it early, late or twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.speculative.sampling import gumbel_noise, keys_tensor
from tlt.types import Request

_BLOCK_ELEMENTS = 1 << 13
"""Noise values computed per sequence at a time (about 0.4 ms of small kernels on a CPU core, however few they are)."""


@dataclass
class _Slot:
    """Whose noise a block holds, and of which positions: start .. end - 1."""

    key: tuple[int, int, int, int]
    is_greedy: bool
    start: int = 0
    end: int = 0


class NoiseBlocks:
    """One block of noise per slot. Greedy sequences have none (zeros)."""

    def __init__(self, vocab_size: int, max_slots: int, max_depth: int, device: torch.device) -> None:
        self.vocab_size, self.max_slots, self.device = vocab_size, max_slots, device
        self.width = max_depth + 1 + max(8, min(_BLOCK_ELEMENTS // vocab_size, 128))
        self.blocks_SWV = torch.zeros(0, self.width, vocab_size, device=device)
        self.slots: list[_Slot] = []

    def admit(self, slot: int, request: Request) -> None:
        assert slot == len(self.slots), "slots are filled without holes"
        if slot >= len(self.blocks_SWV):
            grown = self.blocks_SWV.new_zeros(min(max(16, 2 * slot), self.max_slots), self.width, self.vocab_size)
            grown[: len(self.blocks_SWV)] = self.blocks_SWV
            self.blocks_SWV = grown
        self.slots.append(_Slot(request.key, request.params.temperature == 0))

    def remove(self, slot: int) -> None:
        """The last slot's sequence moves into `slot`."""
        last = self.slots.pop()
        if slot < len(self.slots):
            self.blocks_SWV[slot] = self.blocks_SWV[len(self.slots)]
            self.slots[slot] = last

    def clear(self) -> None:
        self.slots.clear()

    def rows(self, positions: Sequence[int], depth: int) -> Tensor:
        """float32[B, depth + 1, V]: the noise of positions[b] .. positions[b] + depth for the sequence in slot b."""
        needed = depth + 1
        assert needed <= self.width, f"depth {depth} exceeds the noise block of {self.width} positions"
        pairs = list(zip(self.slots, positions, strict=True))
        stale = [i for i, (slot, position) in enumerate(pairs) if position < slot.start or position + needed > slot.end]
        if stale:
            self._refill(stale, positions)
        if len(positions) == 1:
            offset = positions[0] - self.slots[0].start
            return self.blocks_SWV[:1, offset : offset + needed]
        offsets_B1 = torch.tensor([[position - slot.start] for slot, position in pairs], device=self.device)
        rows_B1 = torch.arange(len(pairs), device=self.device)[:, None]
        if depth == 0:
            return self.blocks_SWV[rows_B1, offsets_B1]
        return self.blocks_SWV[rows_B1, offsets_B1 + torch.arange(needed, device=self.device)]

    def _refill(self, stale: Sequence[int], positions: Sequence[int]) -> None:
        """New blocks that start at the positions now wanted."""
        sampled = [i for i in stale if not self.slots[i].is_greedy]
        if sampled:
            keys_B4 = keys_tensor([self.slots[i].key for i in sampled], self.device)
            starts_B1 = torch.tensor([[positions[i]] for i in sampled], device=self.device)
            positions_BW = starts_B1 + torch.arange(self.width, device=self.device)
            self.blocks_SWV[torch.tensor(sampled, device=self.device)] = gumbel_noise(keys_B4, positions_BW, self.vocab_size)
        for i in stale:
            slot = self.slots[i]
            slot.start, slot.end = positions[i], positions[i] + self.width
            if slot.is_greedy:
                self.blocks_SWV[i] = 0.0
