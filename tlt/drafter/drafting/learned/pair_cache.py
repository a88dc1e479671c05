"""EAGLE's cache of pairs, and its levels.

    feature t   the target's last hidden state at position t, of which lm_head makes the logits of token t+1
    pair t      (token t+1, feature t): the drafter's input. Feature t leaves open which token was drawn.
    output t    imitates feature t+1. So lm_head of it proposes token t+2.

    committed tokens   0 1 2 ... n-2 | n-1 (root)
    pairs (t+1, t)     0 1 2 ... n-2                the last pair's output ranks the candidates for position n
                       └ caught up ┘

The target has not read drafted tokens, so output t stands in for feature t+1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.uploads import upload
from tlt.drafter.drafting.learned.draft_cache import DraftCache, Levels
from tlt.drafter.eagle import PackedEagle
from tlt.drafter.pairs import TOKEN_AHEAD
from tlt.drafter.protocol import DraftContext
from tlt.models.attention import cached, storing_prefill
from tlt.models.graphs import MOST_TOKENS, padded_length
from tlt.models.kv_cache import PREFILL_TOKENS, prefill_groups
from tlt.models.target import Target
from tlt.speculation.law.params import Law
from tlt.speculation.law.tree import chain_mask, tree_mask

if TYPE_CHECKING:
    from tlt.drafter.drafting.learned.compiled_chain import CompiledChain

_CATCH_UP_TOKENS = 256
"""Most pairs per sequence in one forward; PREFILL_TOKENS bounds the sum."""

SPARE_COLUMNS = 2 * _CATCH_UP_TOKENS
"""Columns behind a sequence's pairs, for a catch-up's padding and for drafts."""


@dataclass(frozen=True)
class CaughtUp:
    num_pairs: list[int]
    """By row, in columns 0 … of the cache."""
    ends_B: Tensor
    """num_pairs, on the device."""
    offsets_B1: Tensor | None
    """Rotary position of each row's first pair; None: 0 in every row."""
    hidden_BE: Tensor
    """The output at each row's last pair."""


class PairCache(DraftCache):
    model: PackedEagle

    def __init__(
        self, model: PackedEagle, target: Target, captured_size: int, window: int, max_slots: int
    ) -> None:
        super().__init__(model, target, captured_size, window, max_slots, SPARE_COLUMNS, least=2)
        self.chain: CompiledChain | None = None
        if model.compiled is not None:
            from tlt.drafter.drafting.learned.compiled_chain import CompiledChain

            self.chain = CompiledChain(model, target, model.compiled)

    def begin(self, context: DraftContext, strategy: Strategy, roots_B1: Tensor) -> Levels:
        room = strategy.depth if strategy.width == 1 else strategy.depth * strategy.width
        return PairLevels(self, self.catch_up(context, room))

    def draft_chain(
        self, context: DraftContext, law: Law, tau: float, depth: int
    ) -> tuple[Tensor, Tensor] | None:
        if self.chain is None or not self.chain.can_draft():
            return None
        from tlt.drafter.drafting.learned.compiled_chain import Missing

        starts, num_pairs = self._enter(context, depth)
        if max(end - start for start, end in zip(starts, num_pairs, strict=True)) > _CATCH_UP_TOKENS:
            starts = [end - 1 for end in num_pairs]
            self._read_missing(context, self.counts[: len(starts)], starts)
        firsts = self.firsts[: len(starts)]
        begins = [first + start + TOKEN_AHEAD for first, start in zip(firsts, starts, strict=True)]
        tokens = [tokens[begin:] for tokens, begin in zip(context.tokens, begins, strict=True)]
        missing = Missing(tokens, starts, firsts, self.cache.layers, self.history)
        drafted = self.chain.draft(missing, law, tau, depth)
        self.counts[: len(starts)] = num_pairs
        return drafted

    def catch_up(self, context: DraftContext, room: int) -> CaughtUp:
        starts, num_pairs = self._enter(context, room)
        hidden_BE, ends_B, offsets_B1 = self._read_missing(context, starts, num_pairs)
        self.counts[: len(starts)] = num_pairs
        return CaughtUp(num_pairs, ends_B, offsets_B1, hidden_BE)

    def _enter(self, context: DraftContext, room: int) -> tuple[list[int], list[int]]:
        """Reads all but the last pair of new sequences. Returns, by row, the number of cached pairs, and of
        all. room: columns that drafting needs behind the pairs."""
        entering, copies = self.restart(context)
        for group in prefill_groups(entering, lambda slot: len(context.tokens[slot])):
            self._prefill(context, group)
        self.share(copies)
        num_pairs = [
            len(t) - TOKEN_AHEAD - first for t, first in zip(context.tokens, self.firsts, strict=False)
        ]
        self.hold(len(num_pairs), max(num_pairs) + room + _CATCH_UP_TOKENS)
        return self.counts[: len(num_pairs)], num_pairs

    def _prefill(self, context: DraftContext, slots: list[int]) -> None:
        device = self.model.device
        firsts = [self.firsts[slot] for slot in slots]
        ends = [len(context.tokens[slot]) - 1 - TOKEN_AHEAD for slot in slots]
        lengths = [end - first for end, first in zip(ends, firsts, strict=True)]
        self.hold(len(context.tokens), max(lengths))
        alone = [(length, (0,)) for length in lengths]
        attend = storing_prefill(self.model.config.layer, alone, self.cache.layers, slots)
        pairs = list(zip(slots, firsts, lengths, strict=True))
        tokens = [t for s, f, n in pairs for t in context.tokens[s][f + TOKEN_AHEAD : f + TOKEN_AHEAD + n]]
        hidden_NE = self.model.fuse(torch.cat([self.history.read([s], [f], n)[0] for s, f, n in pairs]))
        positions_N = torch.cat([torch.arange(f, f + n, device=device) for _, f, n in pairs])
        self.model.forward(self.target.embed(upload(tokens, device)), hidden_NE, positions_N, attend)
        for slot, _, length in pairs:
            self.counts[slot] = length

    def _read_missing(
        self, context: DraftContext, starts: list[int], num_pairs: list[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows with fewer missing pairs write garbage behind their end, in columns that drafting
        overwrites."""
        device = self.model.device
        missing = [count - start for count, start in zip(num_pairs, starts, strict=True)]
        slots, firsts = range(len(missing)), self.firsts[: len(missing)]
        offsets_B1 = upload(firsts, device)[:, None] if any(firsts) else None
        most = min(_CATCH_UP_TOKENS, max(1, PREFILL_TOKENS // len(missing)))
        rows_B = torch.arange(len(missing), device=device)
        hidden_BE: Tensor | None = None
        done = 0
        while done < max(missing):
            width = min(max(missing) - done, most)
            if records := self.graphs.is_on and len(missing) * width <= MOST_TOKENS // 2:
                width = 1 << (width - 1).bit_length()  # few widths are recorded
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
            if records:
                output_BTE = self._replay(tokens_BT, hidden_BTE, columns_BT, offsets_B1, length)
            else:
                is_plain = width == 1 and len(rows) == 1
                mask = None if is_plain else chain_mask(columns_BT, length, self.model.dtype)
                output_BTE = self.forward(
                    tokens_BT, hidden_BTE, columns_BT, columns_BT, offsets_B1, length, mask
                )
            if len(missing) == 1:
                last_BE = output_BTE[:, -1]
            else:
                last_BE = output_BTE[rows_B, (last_B - done).clamp(0, width - 1)]
            is_read_B1 = (last_B < done)[:, None]
            hidden_BE = last_BE if hidden_BE is None else torch.where(is_read_B1, hidden_BE, last_BE)
            done += width
        assert hidden_BE is not None, "the last pair of every sequence is missing"
        return hidden_BE, ends_B, offsets_B1

    def _replay(
        self,
        tokens_BT: Tensor,
        hidden_BTE: Tensor,
        columns_BT: Tensor,
        offsets_B1: Tensor | None,
        length: int,
    ) -> Tensor:
        length = min(padded_length(length), self.cache.capacity)

        def read(
            tokens_BT: Tensor, hidden_BTE: Tensor, columns_BT: Tensor, offsets_B1: Tensor | None = None
        ) -> tuple[Tensor]:
            mask = chain_mask(columns_BT, length, self.model.dtype)
            return (self.forward(tokens_BT, hidden_BTE, columns_BT, columns_BT, offsets_B1, length, mask),)

        inputs = {"tokens_BT": tokens_BT, "hidden_BTE": hidden_BTE, "columns_BT": columns_BT}
        inputs |= {} if offsets_B1 is None else {"offsets_B1": offsets_B1}
        (output_BTE,) = self.record(("read", length), read, inputs)
        return output_BTE

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
        """Returns [B, T, E].

        pairs_BT: counted from the first in the cache; plus the offset, the rotary position.
        """
        attend = cached(self.model.config.layer, self.cache.layers, columns_BT, length, mask)
        embeddings = self.target.embed(tokens_BT.flatten())
        positions = self.positions(pairs_BT, offsets_B1)
        output_NE = self.model.forward(embeddings, hidden_BTE.flatten(0, 1), positions, attend)
        return output_NE.view(*tokens_BT.shape, -1)


class PairLevels(Levels):
    """length: columns that every level reads; None: those that it needs."""

    def __init__(self, pairs: PairCache, read: CaughtUp, length: int | None = None) -> None:
        self.pairs, self.read, self.length = pairs, read, length
        device, num_rows = read.ends_B.device, len(read.num_pairs)
        self.hidden_BFE = read.hidden_BE[:, None]
        self.seen_BFC = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)  # columns a node may see
        self.rows_B1 = torch.arange(num_rows, device=device)[:, None]
        self.is_even = length is None and min(read.num_pairs) == max(read.num_pairs)
        self.level = self.num_columns = 0  # levels and draft columns so far

    def first(self) -> Tensor:
        return self._logits()

    def next(self, tokens_BF: Tensor, parents_BF: Tensor | None) -> Tensor:
        read, (num_rows, num_next) = self.read, tokens_BF.shape
        start, device = self.num_columns, tokens_BF.device
        length = max(read.num_pairs) + start + num_next if self.length is None else self.length
        columns_BF = read.ends_B[:, None] + start + torch.arange(num_next, device=device)
        hidden_BFE, mask, dtype = self.hidden_BFE, None, self.pairs.model.dtype
        if parents_BF is not None:
            own = torch.eye(num_next, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
            self.seen_BFC = torch.cat([self.seen_BFC[self.rows_B1, parents_BF], own], dim=2)
            hidden_BFE = hidden_BFE[self.rows_B1, parents_BF]
            mask = tree_mask(self.seen_BFC, read.ends_B, length, dtype)
        elif not self.is_even:
            mask = chain_mask(columns_BF, length, dtype)
        pairs_BF = (read.ends_B + self.level)[:, None].expand(-1, num_next)
        self.hidden_BFE = self.pairs.forward(
            tokens_BF, hidden_BFE, pairs_BF, columns_BF, read.offsets_B1, length, mask
        )
        self.level, self.num_columns = self.level + 1, start + num_next
        return self._logits()

    def _logits(self) -> Tensor:
        return self.pairs.model.logits(self.hidden_BFE, self.pairs.target)
