"""The law's noise for the running batch, computed ahead in blocks: one call per sequence and block instead of one per token.

A block is a pure function of (key, position), so computing it early, late or twice changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.speculative.sampling import gumbel_noise, keys_tensor
from tlt.types import Request

_BLOCK_ELEMENTS = 1 << 13
"""Noise values computed per sequence at a time (about 0.4 ms of small kernels on a CPU core, however few they are)."""


class NoiseBlocks:
    """Per slot, the noise of positions start .. start + width - 1. Greedy sequences have none (zeros)."""

    def __init__(self, vocab_size: int, max_slots: int, max_depth: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.width = max_depth + 1 + max(8, min(_BLOCK_ELEMENTS // vocab_size, 128))
        self.blocks_SWV = torch.zeros(0, self.width, vocab_size, device=device)
        self.max_slots = max_slots
        self.keys: list[tuple[int, int, int, int]] = []
        self.greedy: list[bool] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def admit(self, slot: int, request: Request) -> None:
        assert slot == len(self.keys)
        if slot >= len(self.blocks_SWV):
            grown = self.blocks_SWV.new_zeros(min(max(16, 2 * slot), self.max_slots), self.width, self.vocab_size)
            grown[: len(self.blocks_SWV)] = self.blocks_SWV
            self.blocks_SWV = grown
        self.keys.append(request.key)
        self.greedy.append(request.params.temperature == 0)
        self.starts.append(0)
        self.ends.append(0)

    def remove(self, slot: int) -> None:
        """The last slot's sequence moves into `slot`."""
        last = len(self.keys) - 1
        if slot != last:
            self.blocks_SWV[slot] = self.blocks_SWV[last]
        for values in (self.keys, self.greedy, self.starts, self.ends):
            values[slot] = values[last]  # type: ignore[index]
            values.pop()

    def clear(self) -> None:
        for values in (self.keys, self.greedy, self.starts, self.ends):
            values.clear()

    def rows(self, positions: list[int], depth: int) -> Tensor:
        """float32[B, depth + 1, V]: the noise of positions[b] .. positions[b] + depth for the sequence in slot b."""
        needed = depth + 1
        assert needed <= self.width, f"depth {depth} exceeds the noise block of {self.width} positions"
        stale = [
            slot
            for slot, position in enumerate(positions)
            if position < self.starts[slot] or position + needed > self.ends[slot]
        ]
        if stale:
            self._refill(stale, positions)
        if len(positions) == 1:
            offset = positions[0] - self.starts[0]
            return self.blocks_SWV[:1, offset : offset + needed]
        offsets_B = torch.tensor([p - s for p, s in zip(positions, self.starts, strict=True)], device=self.device)
        rows_B = torch.arange(len(positions), device=self.device)
        if depth == 0:
            return self.blocks_SWV[rows_B, offsets_B][:, None]
        return self.blocks_SWV[rows_B[:, None], offsets_B[:, None] + torch.arange(needed, device=self.device)]

    def _refill(self, slots: list[int], positions: list[int]) -> None:
        sampled = [slot for slot in slots if not self.greedy[slot]]
        if sampled:
            keys_B4 = keys_tensor([self.keys[slot] for slot in sampled], self.device)
            starts_B = torch.tensor([positions[slot] for slot in sampled], device=self.device)
            columns_BW = starts_B[:, None] + torch.arange(self.width, device=self.device)
            self.blocks_SWV[torch.tensor(sampled, device=self.device)] = gumbel_noise(keys_B4, columns_BW, self.vocab_size)
        for slot in slots:
            if self.greedy[slot]:
                self.blocks_SWV[slot] = 0.0
            self.starts[slot], self.ends[slot] = positions[slot], positions[slot] + self.width
