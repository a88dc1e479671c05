"""Hidden states that a learned drafter skips while nothing is drafted. Imports no vLLM.

    no drafts     hidden states ─▶ kept, by slot and position                 the drafter does not run
    drafts again  kept ─▶ a pass of the drafter over all that it has not read ─▶ vLLM's own proposal

vLLM runs an EAGLE drafter in every step, so that its keys and values are complete. Here it skips steps
without drafts, but reads prompts at once: they are long, and requests share their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.base.uploads import upload

KEPT_BYTES = 1 << 28
"""Memory for skipped hidden states. A request that has filled its share is read at once."""

NOTHING = np.iinfo(np.int64).max
"""First unread position of a slot where all is read."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """A step's requests: the target computes `counts_B` positions, from `starts_B` on."""

    slots_B: Integers
    starts_B: Integers
    counts_B: Integers
    are_prompts_B: np.ndarray[Any, np.dtype[np.bool_]]
    """vLLM's own pass reads these rows."""


@dataclass(frozen=True)
class Unread:
    """A drafter pass: of some rows of a step, positions `firsts_B` to `ends_B`."""

    rows_B: Integers
    slots_B: Integers
    firsts_B: Integers
    ends_B: Integers
    """The step's first positions, for vLLM's own proposal."""

    @property
    def counts_B(self) -> Integers:
        return self.ends_B - self.firsts_B

    @property
    def borders(self) -> Integers:
        """Offset of each row in the pass, then the pass's size."""
        return np.concatenate([[0], self.counts_B.cumsum()])

    @property
    def behind_N(self) -> Integers:
        """Distance of each position from its row's end, negative."""
        return np.arange(self.borders[-1]) - self.each(self.borders[1:])

    def each(self, values_B: Integers) -> Integers:
        return np.repeat(values_B, self.counts_B)


Read = Callable[[Unread], None]


def why_awake(config: Any, own: Mapping[str, bool]) -> str | None:
    """Why a drafter may miss no step. own: the runner's reasons → whether they hold."""
    reasons = {
        "data-parallel ranks wait for its passes": config.parallel_config.data_parallel_size > 1,
        "its keys and values go to other engines": config.kv_transfer_config is not None,
        **own,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class UnreadPositions:
    """Hidden states that the drafter has not read.

    longest: positions of a sequence.
    longest_pass: positions of a drafter pass.
    """

    def __init__(self, num_slots: int, longest: int, longest_pass: int) -> None:
        self.longest, self.longest_pass = longest, longest_pass
        self.first_S = np.full(num_slots, NOTHING)
        """First unread position, by slot."""
        self.kept_SRF: Tensor | None = None
        """Position p of a slot is in row p modulo R."""

    def forget(self, slot: int) -> None:
        self.first_S[slot] = NOTHING

    def take(self, slots_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns [N, F]."""
        assert self.kept_SRF is not None
        return self.kept_SRF[slots_N, positions_N % self.kept_SRF.shape[1]]

    def read(self, rows: Rows, indices: Integers, read: Read) -> None:
        """Reads what is unread before the step's first positions, of the rows at these indices."""
        firsts_B = self.first_S[rows.slots_B]
        for some in self._passes(indices, rows.starts_B - firsts_B):
            read(Unread(some, rows.slots_B[some], firsts_B[some], rows.starts_B[some]))
        self.first_S[rows.slots_B[indices]] = NOTHING

    def must_run(self, rows: Rows, hidden_NF: Tensor) -> bool:
        """Whether a row of the step is a prompt, or longer than the room."""
        room = self.make_room(hidden_NF).shape[1]
        return bool((rows.are_prompts_B | (rows.counts_B > room)).any())

    def store(
        self, rows: Rows, hidden_NF: Tensor, positions_N: Tensor, slots_B: Tensor, read: Read, runs: bool
    ) -> None:
        """Stores a step's hidden states, padded at the end or not. runs: see `must_run`."""
        hidden_NF = hidden_NF[: rows.counts_B.sum()]
        room = self.make_room(hidden_NF).shape[1]
        if not runs:
            self.first_S[rows.slots_B] = np.minimum(self.first_S[rows.slots_B], rows.starts_B)
        is_full_B = rows.starts_B + rows.counts_B - self.first_S[rows.slots_B] > room
        if is_full_B.any():
            self.read(rows, np.flatnonzero(is_full_B), read)
            if not runs:
                self.first_S[rows.slots_B[is_full_B]] = rows.starts_B[is_full_B]
        # where the drafter runs, it reads also the rows of requests with nothing unread
        self._write(rows, hidden_NF, positions_N, slots_B)

    def make_room(self, hidden_NF: Tensor) -> Tensor:
        if self.kept_SRF is None:
            num_slots, width = len(self.first_S), hidden_NF.shape[1]
            share = KEPT_BYTES // (num_slots * width * hidden_NF.element_size())
            room = min(max(share, 1), self.longest, self.longest_pass)
            self.kept_SRF = hidden_NF.new_empty(num_slots, room, width)
        return self.kept_SRF

    def _write(self, rows: Rows, hidden_NF: Tensor, positions_N: Tensor, slots_B: Tensor) -> None:
        assert self.kept_SRF is not None
        is_kept_B = self.first_S[rows.slots_B] < NOTHING
        if not is_kept_B.any():
            return
        positions_N, slots_N = positions_N[: len(hidden_NF)], slots_B
        if len(hidden_NF) > len(is_kept_B) or not is_kept_B.all():
            rows_N = np.repeat(np.arange(len(is_kept_B)), rows.counts_B)
            at_N = np.flatnonzero(is_kept_B[rows_N])
            at, at_rows = upload([at_N.tolist(), rows_N[at_N].tolist()], hidden_NF.device, torch.int64)
            hidden_NF, positions_N, slots_N = hidden_NF[at], positions_N[at], slots_B[at_rows]
        self.kept_SRF[slots_N, positions_N % self.kept_SRF.shape[1]] = hidden_NF

    def _passes(self, indices: Integers, counts_B: Integers) -> Iterator[Integers]:
        group, size = list[int](), 0
        for index in indices[counts_B[indices] > 0].tolist():
            if size + counts_B[index] > self.longest_pass:
                yield np.array(group)
                group, size = [], 0
            group.append(index)
            size += counts_B[index]
        if group:
            yield np.array(group)


def features(hidden_states: Tensor, aux_hidden_states: Sequence[Tensor] | None) -> Tensor:
    return torch.cat(tuple(aux_hidden_states), dim=-1) if aux_hidden_states else hidden_states
