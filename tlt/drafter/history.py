"""The target's features of the latest positions of every slot: what a drafter needs when it is switched on.

A ring of `window` positions per slot. What the engine hands over is only kept at first (no operation on tensors) and
written in bulk when somebody reads, when sequences change their slots, or when it has become much: so a decoding step
without speculation costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.types import Strategy

_MAX_QUEUED = 64
"""Steps kept unwritten; bounds the memory of the queue."""


class FeatureHistory:
    """Positions beyond the committed tokens may be written (rejected drafts) and are written again before they are read;
    the ring is wider than the window by as many as one step can draft, so that these never overwrite what is needed."""

    def __init__(self, size: int, window: int, max_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.max_slots, self.device = window, max_slots, device
        self.num_columns = window + Strategy.MAX_DEPTH + 1
        self.ring_SCF = torch.zeros(0, min(128, self.num_columns), size, dtype=dtype, device=device)
        self._queue: list[Tensor] = []
        self._slots: tuple[int, ...] = ()
        self._starts: list[int] = []

    @property
    def num_bytes(self) -> int:
        return self.ring_SCF.nbytes

    def write(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Features of T positions from starts[b] on for the sequence in slots[b]."""
        slots = tuple(slots)
        follows = slots == self._slots and all(
            start == first + len(self._queue) for start, first in zip(starts, self._starts, strict=True)
        )
        if features_BTF.shape[1] == 1 and follows and len(self._queue) < _MAX_QUEUED:
            self._queue.append(features_BTF)
            return
        self.flush()
        if features_BTF.shape[1] == 1:
            self._slots, self._starts, self._queue = slots, list(starts), [features_BTF]
        else:
            self._store(slots, starts, features_BTF)

    def flush(self) -> None:
        if self._queue:
            queue, self._queue = self._queue, []
            self._store(self._slots, self._starts, queue[0] if len(queue) == 1 else torch.cat(queue, dim=1))
        self._slots = ()

    def read(self, slots: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        """[B, num_positions, F]; what lies beyond the committed tokens is rubbish."""
        self.flush()
        self._reserve(max(slots) + 1, max(starts) + num_positions)
        return self.ring_SCF[self._index(slots, starts, num_positions)]

    def first_known(self, num_known: int) -> int:
        """The earliest position still held of a sequence whose first `num_known` positions have been written."""
        return max(num_known - self.window, 0)

    def move(self, source: int, target: int) -> None:
        self.flush()
        self._reserve(max(source, target) + 1, 0)
        self.ring_SCF[target] = self.ring_SCF[source]

    def release(self) -> None:
        self._queue, self._slots = [], ()
        self.ring_SCF = self.ring_SCF[:0, : min(128, self.num_columns)].clone()

    def _store(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        skipped = max(features_BTF.shape[1] - self.num_columns, 0)  # a prompt longer than the ring
        starts = [start + skipped for start in starts]
        num_positions = features_BTF.shape[1] - skipped
        self._reserve(max(slots) + 1, max(starts) + num_positions)
        self.ring_SCF[self._index(slots, starts, num_positions)] = features_BTF[:, skipped:]

    def _index(self, slots: Sequence[int], starts: Sequence[int], num_positions: int) -> tuple[Tensor, Tensor]:
        slots_B1 = torch.tensor(slots, device=self.device)[:, None]
        columns_BT = torch.tensor(starts, device=self.device)[:, None] + torch.arange(num_positions, device=self.device)
        if max(starts) + num_positions > self.num_columns:
            columns_BT %= self.num_columns
        return slots_B1, columns_BT

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        slots, columns, size = self.ring_SCF.shape
        wanted = min(num_positions, self.num_columns)
        if num_slots > slots or wanted > columns:
            slots_wanted = slots if num_slots <= slots else min(max(num_slots, 2 * slots), self.max_slots)
            columns_wanted = columns if wanted <= columns else min(2 * wanted, self.num_columns)
            grown = self.ring_SCF.new_zeros(slots_wanted, columns_wanted, size)
            grown[:slots, :columns] = self.ring_SCF
            self.ring_SCF = grown
