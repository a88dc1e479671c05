"""The law's noise for the running batch, computed ahead in blocks: one call per sequence and block instead of one per token.

    slot 0  ▏positions 40 … 168▕     a refill computes a part at a time, so that what it holds meanwhile is bounded
    slot 1  ▏positions 12 … 140▕
    slot 2  computed anew for every step: no room for another block

A block is a pure function of (key, position), so computing it early, late or twice changes nothing. On a GPU there are none:
a kernel makes the noise while it draws (speculative/fused.py), and what a drafter ranks with is made for the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.speculative.sampling import gumbel_noise, keys_tensor
from tlt.speculative.tree import TreeLayout
from tlt.speculative.verify import Noise, NoiseAt
from tlt.types import Request

_BLOCK_ELEMENTS = 1 << 13
"""Noise values computed per sequence at a time (about 0.4 ms of small kernels on a CPU core, however few they are)."""

REFILL_BYTES = 28 << 22
"""Memory of a refill. A value takes 28 bytes while it is made."""

KEPT_BYTES = 1 << 30
"""Memory of all blocks. With a vocabulary of 152k, that is enough for 43 sequences; those beyond have none."""


@dataclass
class _Slot:
    """Whose noise a block holds, and of which positions: start .. end - 1."""

    key: tuple[int, int, int, int]
    is_greedy: bool
    start: int = 0
    end: int = 0


class NoiseBlocks:
    """One block of noise per slot, for as many slots as there is memory for. Greedy sequences have none (zeros).

    is_ahead: whether noise is made before it is drawn with; not on a GPU.
    """

    def __init__(self, vocab_size: int, max_slots: int, max_depth: int, device: torch.device) -> None:
        self.is_ahead = device.type != "cuda"
        self.vocab_size, self.device = vocab_size, device
        self.width = max_depth + 1 + max(8, min(_BLOCK_ELEMENTS // vocab_size, 128))
        self.max_blocks = min(max_slots, KEPT_BYTES // (4 * self.width * vocab_size)) if self.is_ahead else 0
        self.blocks_SWV = torch.zeros(0, self.width, vocab_size, device=device)
        self.slots: list[_Slot] = []
        self._keys_B4: Tensor | None = None

    def admit(self, slot: int, request: Request) -> None:
        assert slot == len(self.slots), "slots are filled without holes"
        if len(self.blocks_SWV) <= slot < self.max_blocks:
            grown = self.blocks_SWV.new_zeros(min(max(16, 2 * slot), self.max_blocks), self.width, self.vocab_size)
            grown[: len(self.blocks_SWV)] = self.blocks_SWV
            self.blocks_SWV = grown
        self.slots.append(_Slot(request.key, request.params.temperature == 0))
        self._keys_B4 = None

    def remove(self, slot: int) -> None:
        """The last slot's sequence moves into `slot`."""
        last, self._keys_B4 = self.slots.pop(), None
        if slot < len(self.slots):
            if len(self.slots) < self.max_blocks:
                self.blocks_SWV[slot] = self.blocks_SWV[len(self.slots)]
            self.slots[slot] = last

    def clear(self) -> None:
        self.slots.clear()
        self._keys_B4 = None

    def release(self) -> None:
        """Gives the memory back; only when nothing runs."""
        assert not self.slots, "blocks of running sequences"
        self.blocks_SWV = self.blocks_SWV[:0].clone()

    def rows(self, positions: Sequence[int], depth: int) -> Tensor:
        """float32[B, depth + 1, V]: the noise of positions[b] .. positions[b] + depth for the sequence in slot b. Where
        it is not made ahead, [B, depth, V]: what a drafter ranks with, and nothing without drafts."""
        needed = depth + 1 if self.is_ahead else depth
        assert needed <= self.width, f"depth {depth} exceeds the noise block of {self.width} positions"
        pairs = list(zip(self.slots, positions, strict=True))
        kept = pairs[: self.max_blocks]
        stale = [i for i, (slot, position) in enumerate(kept) if position < slot.start or position + needed > slot.end]
        if stale:
            self._refill(stale, positions)
        if len(kept) < len(pairs):
            rows_BDV = torch.zeros(len(pairs), needed, self.vocab_size, device=self.device)
            if not needed:
                return rows_BDV
            if kept:
                rows_BDV[: len(kept)] = self._read(kept, needed)
            beyond = range(len(kept), len(pairs))
            return self._fill(rows_BDV, list(beyond), [positions[i] for i in beyond])
        return self._read(kept, needed)

    def of_nodes(self, nodes: TreeLayout, noise_BDV: Tensor, rows: Sequence[int], first: int, end: int) -> Noise:
        """Returns the noise of the position that follows each node, in columns first .. end - 1 of these rows. noise_BDV: what
        `rows` gave for this step; it serves all rows from column 0 on."""
        if self.is_ahead and first == 0:
            return nodes.of_depths(noise_BDV)[:, :end]
        if self._keys_B4 is None:
            self._keys_B4 = keys_tensor([slot.key for slot in self.slots], self.device)
        return NoiseAt(self._keys_B4[rows], nodes.positions_BN[rows, first:end] + 1)

    def _read(self, pairs: Sequence[tuple[_Slot, int]], needed: int) -> Tensor:
        """Returns the positions now wanted, out of blocks that hold them."""
        if len(pairs) == 1:
            ((slot, position),) = pairs
            return self.blocks_SWV[:1, position - slot.start : position - slot.start + needed]
        offsets_B1 = torch.tensor([[position - slot.start] for slot, position in pairs], device=self.device)
        rows_B1 = torch.arange(len(pairs), device=self.device)[:, None]
        if needed == 1:
            return self.blocks_SWV[rows_B1, offsets_B1]
        return self.blocks_SWV[rows_B1, offsets_B1 + torch.arange(needed, device=self.device)]

    def _refill(self, stale: Sequence[int], positions: Sequence[int]) -> None:
        """New blocks that start at the positions now wanted."""
        self._fill(self.blocks_SWV, stale, [positions[i] for i in stale])
        for i in stale:
            slot = self.slots[i]
            slot.start, slot.end = positions[i], positions[i] + self.width
            if slot.is_greedy:
                self.blocks_SWV[i] = 0.0

    def _fill(self, rows_SWV: Tensor, slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Writes the noise of the positions from starts[i] on into the row of slots[i], a bounded part at a time; greedy ones
        stay as they are."""
        sampled = [(slot, start) for slot, start in zip(slots, starts, strict=True) if not self.slots[slot].is_greedy]
        width = rows_SWV.shape[1]
        per_row = max(REFILL_BYTES // (28 * self.vocab_size), 1)  # positions
        for rows in _parts(sampled, max(per_row // width, 1)):
            keys_B4 = keys_tensor([self.slots[slot].key for slot, _ in rows], self.device)
            rows_B = torch.tensor([slot for slot, _ in rows], device=self.device)
            starts_B1 = torch.tensor([[start] for _, start in rows], device=self.device)
            for columns_T in torch.arange(width, device=self.device).split(per_row):
                rows_SWV[rows_B[:, None], columns_T] = gumbel_noise(keys_B4, starts_B1 + columns_T, self.vocab_size)
        return rows_SWV


def _parts(items: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    return (items[i : i + size] for i in range(0, len(items), size))
