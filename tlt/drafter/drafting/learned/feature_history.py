"""The target's latest features of every running sequence, for speculation switched on in the middle of a
response.

    a decoding step ── write ─▶ queue ── flush ─▶ ring, one per slot ── read ─▶ the drafter

Without speculation features must cost nothing, so many steps are copied at once. F: size of a feature, C:
columns of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.uploads import upload
from tlt.models.kv_budget import BLOCK, whole_blocks

_MAX_QUEUED = 64
"""Decoding steps in the queue; bounds its memory."""

_FEW_SLOTS = 8
"""On a CPU as many slices are copied sooner than one index is made."""


class FeatureHistory:
    """Holds each slot's latest `window` positions in a ring: position p lies in column p mod C. The ring is
    wider than the window by the longest draft, so rejected drafts overwrite no position of the window."""

    def __init__(
        self, size: int, window: int, max_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window, self.max_slots, self.device = window, max_slots, device
        self.num_columns = window + Strategy.MAX_DEPTH + 1
        self.ring_SCF = torch.zeros(0, min(BLOCK, self.num_columns), size, dtype=dtype, device=device)
        self._room: tuple[int, int] | None = None
        self._queue: list[Tensor] = []
        self._slots: tuple[int, ...] = ()
        self._starts: list[int] = []

    @property
    def num_bytes(self) -> int:
        return self.ring_SCF.nbytes

    def slot_bytes(self, length: int) -> int:
        num_columns = min(whole_blocks(length), self.num_columns) + _MAX_QUEUED
        return num_columns * self.ring_SCF.shape[2] * self.ring_SCF.element_size()

    def reserve(self, num_slots: int, length: int) -> None:
        self._room = num_slots, min(length, self.num_columns)
        if len(self.ring_SCF) > num_slots or self.ring_SCF.shape[1] > self._room[1]:
            self.flush()
            self.ring_SCF = self.ring_SCF[:num_slots, : self._room[1]].clone()

    def write(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Keeps T positions from starts[b] on."""
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
        """Returns [B, num_positions, F] from starts[b] on, arbitrary where no token is committed."""
        self.flush()
        self._reserve(max(slots) + 1, max(starts) + num_positions)
        return self.ring_SCF[self._index(slots, starts, num_positions)]

    def gather(self, slots_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns [N, F]."""
        self.flush()
        return self.ring_SCF[slots_N, positions_N % self.num_columns]

    def first_known(self, num_known: int) -> int:
        return max(num_known - self.window, 0)

    def move(self, source: int, target: int) -> None:
        self.flush()
        self._reserve(max(source, target) + 1, 0)
        self.ring_SCF[target] = self.ring_SCF[source]

    def copy_out(self, slot: int, num_positions: int) -> Tensor:
        """Returns [C, F], C at most `num_positions`."""
        self.flush()
        self._reserve(slot + 1, num_positions)
        return self.ring_SCF[slot, :num_positions].clone()

    def copy_in(self, slot: int, own_CF: Tensor) -> None:
        self.flush()
        self._reserve(slot + 1, len(own_CF))
        self.ring_SCF[slot, : len(own_CF)] = own_CF

    def release(self) -> None:
        self._queue, self._slots, self._room = [], (), None
        self.ring_SCF = self.ring_SCF[:0, : min(BLOCK, self.num_columns)].clone()

    def _store(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        skipped = max(features_BTF.shape[1] - self.num_columns, 0)  # a prompt longer than the ring
        starts = [start + skipped for start in starts]
        num_positions = features_BTF.shape[1] - skipped
        end = max(starts) + num_positions
        self._reserve(max(slots) + 1, end)
        if self.device.type == "cpu" and len(slots) <= _FEW_SLOTS and end <= self.num_columns:
            for slot, start, features_TF in zip(slots, starts, features_BTF, strict=True):
                self.ring_SCF[slot, start : start + num_positions] = features_TF[skipped:]
            return
        self.ring_SCF[self._index(slots, starts, num_positions)] = features_BTF[:, skipped:]

    def _index(
        self, slots: Sequence[int], starts: Sequence[int], num_positions: int
    ) -> tuple[Tensor, Tensor]:
        slots_B1, starts_B1 = upload([[*slots], [*starts]], self.device)[..., None]
        columns_BT = starts_B1 + torch.arange(num_positions, device=self.device)
        if max(starts) + num_positions > self.num_columns:
            columns_BT %= self.num_columns
        return slots_B1, columns_BT

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        slots, columns, size = self.ring_SCF.shape
        wanted = min(num_positions, self.num_columns)
        if num_slots <= slots and wanted <= columns:
            return
        bound = self._room or (min(2 * slots, self.max_slots), min(2 * wanted, self.num_columns))
        slots_wanted = slots if num_slots <= slots else max(num_slots, bound[0])
        columns_wanted = columns if wanted <= columns else max(wanted, bound[1])
        grown = self.ring_SCF.new_zeros(slots_wanted, columns_wanted, size)
        grown[:slots, :columns] = self.ring_SCF
        self.ring_SCF = grown
