"""The learned drafter's cache: keys and values of the pairs that it has read, features of those to read next.

    committed tokens   0 1 2 ... n-2 | n-1 (root)
    pairs (t+1, t)     0 1 2 ... n-2                the last pair's output ranks the candidates for position n
                       └ caught up ┘

Pair t is (token t+1, the target's feature t), the drafter's input (learned.py says why). Every proposal first
reads the pairs committed since the last one: a few while speculating, up to the window of kept features when
speculation is switched on late. The target never runs for this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.drafting.feature_history import FeatureHistory
from tlt.drafter.model import TOKEN_AHEAD, PackedDrafter
from tlt.models.attention import StoringPrefill, cached
from tlt.models.kv_cache import Cache, prefill_groups
from tlt.models.packed import PackedTransformer
from tlt.speculative.protocol import DraftContext
from tlt.speculative.tree import chain_mask
from tlt.uploads import upload

_CATCH_UP_TOKENS = 256
"""Most pairs per sequence in one forward; bounds the mask after a late switch on."""

SPARE_COLUMNS = 2 * _CATCH_UP_TOKENS
"""Columns behind a sequence's pairs: for a catch-up's padding, and for the drafts."""


@dataclass(frozen=True)
class CaughtUp:
    """The cache of the running sequences when drafting starts."""

    num_pairs: list[int]
    """Pairs of each row, in columns 0 … of the cache."""
    ends_B: Tensor
    """num_pairs, on the device."""
    offsets_B1: Tensor | None
    """Rotary position of each row's first pair; None: 0 in every row."""
    hidden_BE: Tensor
    """The drafter's output at each row's last pair."""


class PairCache:
    """Reads the running sequences for the drafter, each in the slot that the engine gave it.

    captured_size: width of the features at a position, those included that only training needs.
    window: positions per sequence whose features are kept; pairs further back are never read.
    """

    def __init__(
        self, model: PackedDrafter, target: PackedTransformer, captured_size: int, window: int, max_slots: int
    ) -> None:
        self.model, self.target = model, target
        self.cache = Cache(model.config.layer, 1, model.dtype, model.device, max_slots)
        self.history = FeatureHistory(captured_size, window, max_slots, model.dtype, model.device)
        self.room: tuple[int, int] | None = None  # slots and tokens of the engine's cache; None: unknown
        self.firsts = [0] * max_slots  # position of the pair in column 0
        self.counts = [0] * max_slots  # pairs in the cache

    def admit(self, slot: int) -> None:
        self.firsts[slot] = self.counts[slot] = 0

    def forget(self) -> None:
        """Drops the cache; it is computed again from the kept features."""
        self.counts = [0] * len(self.counts)

    def move(self, source: int, target: int) -> None:
        self.firsts[target], self.counts[target] = self.firsts[source], self.counts[source]
        self.history.move(source, target)
        if self.counts[source]:
            self.cache.move(source, target, self.counts[source])

    def slot_bytes(self, length: int) -> int:
        return self.cache.slot_bytes(length + SPARE_COLUMNS) + self.history.slot_bytes(length)

    def reserve(self, num_slots: int, length: int) -> None:
        """Bounds the caches to `num_slots` sequences of `length` tokens. They grow when needed."""
        self.room = num_slots, length
        self.history.reserve(num_slots, length)
        slots = min(self.cache.num_slots, num_slots)
        columns = min(self.cache.capacity, length + SPARE_COLUMNS)
        if slots and (slots, columns) != (self.cache.num_slots, self.cache.capacity):
            self.cache.resize(slots, columns)

    def _hold(self, num_slots: int, num_columns: int) -> None:
        if self.room is None:
            self.cache.reserve(num_slots, num_columns)
        elif not self.cache.holds(num_slots, num_columns):
            slots, length = self.room
            self.cache.resize(max(slots, num_slots), max(length + SPARE_COLUMNS, num_columns))

    def release(self) -> None:
        self.room = None
        self.cache.release()
        self.history.release()

    def catch_up(self, context: DraftContext, room: int) -> CaughtUp:
        """Reads all committed pairs. room: columns that drafting needs behind them."""
        num_rows = len(context.tokens)
        starts, firsts = self._enter(context), self.firsts[:num_rows]
        num_pairs = [len(t) - TOKEN_AHEAD - first for t, first in zip(context.tokens, firsts, strict=True)]
        self._hold(num_rows, max(num_pairs) + room + _CATCH_UP_TOKENS)
        offsets_B1 = upload(firsts, self.model.device)[:, None] if any(firsts) else None
        hidden_BE, ends_B = self._read_missing(context, starts, num_pairs, offsets_B1)
        self.counts[:num_rows] = num_pairs
        return CaughtUp(num_pairs, ends_B, offsets_B1, hidden_BE)

    def _enter(self, context: DraftContext) -> list[int]:
        """Reads all pairs but the last of sequences that are not in the cache, or whose next pair has left
        the window, by packed forwards; samples of one prompt share the work. Returns the pairs in the cache
        by row."""
        entering: list[int] = []
        copies: list[tuple[int, int]] = []
        leader_of: dict[tuple[int, ...], int] = {}
        for slot, (tokens, request) in enumerate(zip(context.tokens, context.requests, strict=True)):
            known = len(tokens) - 1
            if self.firsts[slot] + self.counts[slot] < self.history.first_known(known):
                self.firsts[slot], self.counts[slot] = self.history.first_known(known), 0
            if self.counts[slot] or known - self.firsts[slot] < 2:
                continue
            is_prompt = len(tokens) == len(request.prompt_ids)
            if is_prompt and (leader := leader_of.setdefault(request.prompt_ids, slot)) != slot:
                copies.append((leader, slot))
            else:
                entering.append(slot)
        for group in prefill_groups(entering, lambda slot: len(context.tokens[slot])):
            self._prefill(context, group)
        for leader, slot in copies:
            self.cache.move(leader, slot, self.counts[leader])
            self.firsts[slot], self.counts[slot] = self.firsts[leader], self.counts[leader]
        return self.counts[: len(context.tokens)]

    def _prefill(self, context: DraftContext, slots: list[int]) -> None:
        device = self.model.device
        firsts = [self.firsts[slot] for slot in slots]
        ends = [len(context.tokens[slot]) - 1 - TOKEN_AHEAD for slot in slots]
        lengths = [end - first for end, first in zip(ends, firsts, strict=True)]
        self._hold(len(context.tokens), max(lengths))
        alone = [(length, (0,)) for length in lengths]
        attend = StoringPrefill(self.model.config.layer, alone, self.cache.layers, slots)
        pairs = list(zip(slots, firsts, lengths, strict=True))
        tokens = [t for s, f, n in pairs for t in context.tokens[s][f + TOKEN_AHEAD : f + TOKEN_AHEAD + n]]
        hidden_NE = self.model.fuse(torch.cat([self.history.read([s], [f], n)[0] for s, f, n in pairs]))
        positions_N = torch.cat([torch.arange(f, f + n, device=device) for _, f, n in pairs])
        self.model.forward(self.target.embed(upload(tokens, device)), hidden_NE, positions_N, attend)
        for slot, _, length in pairs:
            self.counts[slot] = length

    def _read_missing(
        self, context: DraftContext, starts: list[int], num_pairs: list[int], offsets_B1: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Reads every pair that is not in the cache; returns the output of each sequence's last one, and
        num_pairs on the device. Rows with fewer missing pairs write garbage behind their end, in columns that
        drafting overwrites."""
        device = self.model.device
        missing = [count - start for count, start in zip(num_pairs, starts, strict=True)]
        slots, firsts = range(len(missing)), self.firsts[: len(missing)]
        outputs, done = [], 0
        while done < max(missing):
            width = min(max(missing) - done, _CATCH_UP_TOKENS)
            columns = [min(start + done, count) for start, count in zip(starts, num_pairs, strict=True)]
            begins = [first + column for first, column in zip(firsts, columns, strict=True)]
            begun = zip(context.tokens, begins, strict=True)
            rows = [tokens[b + TOKEN_AHEAD : b + TOKEN_AHEAD + width] for tokens, b in begun]
            places = zip(rows, columns, num_pairs, missing, strict=True)
            sent = [[*row, *[0] * (width - len(row)), column, n, num - 1] for row, column, n, num in places]
            sent_BX = upload(sent, device)  # one upload: each costs a GPU's host as much as a kernel
            tokens_BT, (first_B, ends_B, last_B) = sent_BX[:, :width], sent_BX[:, width:].unbind(1)
            hidden_NE = self.model.fuse(self.history.read(slots, begins, width).flatten(0, 1))
            hidden_BTE = hidden_NE.view(len(rows), width, -1)
            columns_BT = first_B[:, None] + torch.arange(width, device=device)
            length = max(columns) + width
            is_plain = width == 1 and len(rows) == 1
            mask = None if is_plain else chain_mask(columns_BT, length, self.model.dtype)
            outputs.append(
                self.forward(tokens_BT, hidden_BTE, columns_BT, columns_BT, offsets_B1, length, mask)
            )
            done += width
        output_BTE = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if len(missing) == 1:
            return output_BTE[:, missing[0] - 1], ends_B
        return output_BTE[torch.arange(len(missing), device=device), last_B], ends_B

    def forward(
        self,
        tokens_BT: Tensor,
        hidden_BTE: Tensor,
        pairs_BT: Tensor,
        columns_BT: Tensor,
        offsets_B1: Tensor | None,
        length: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Runs the drafter over T pairs of each row behind what is cached; returns [B, T, E].

        `pairs_BT` counts pairs from the first in the cache; with the offset it is the rotary position.
        """
        attend = cached(self.model.config.layer, self.cache.layers, columns_BT, length, mask)
        embeddings = self.target.embed(tokens_BT.flatten())
        positions_BT = pairs_BT if offsets_B1 is None else pairs_BT + offsets_B1
        positions = positions_BT.flatten().clamp_max(self.model.config.layer.max_positions - 1)
        output_NE = self.model.forward(embeddings, hidden_BTE.flatten(0, 1), positions, attend)
        return output_NE.view(*tokens_BT.shape, -1)
