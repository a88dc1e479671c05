"""A block drafter's cache and levels.

    committed tokens   0 1 2 ... n-2 | n-1 (root, the anchor)
    context            0 1 2 ... n-2   made of the target's captured features, and kept
    block                              n-1, n, n+1, …   written behind the context, overwritten by the next

A level is a slot of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.uploads import upload
from tlt.drafter.block import PackedBlock, fill_blocks
from tlt.drafter.drafting.learned.draft_cache import DraftCache, Levels
from tlt.drafter.protocol import DraftContext
from tlt.models.attention import cached
from tlt.models.kv_cache import prefill_groups
from tlt.models.target import Target
from tlt.speculation.law.tree import chain_mask

_ROWS_AT_ONCE = 64
"""Most slots whose logits are one product, which reads the head once. Beyond, one level's logits exist at a
time."""


class BlockCache(DraftCache):
    model: PackedBlock

    def __init__(
        self, model: PackedBlock, target: Target, captured_size: int, window: int, max_slots: int
    ) -> None:
        spare = model.config.block_size
        super().__init__(model, target, captured_size, window, max_slots, spare, least=1)

    def begin(self, context: DraftContext, strategy: Strategy, roots_B1: Tensor) -> Levels:
        shape, num_rows = self.model.config, len(context.tokens)
        num_slots = shape.first_slot + min(strategy.depth, shape.max_depth)
        self._read_missing(context)
        ends, firsts = self.counts[:num_rows], self.firsts[:num_rows]
        ends_B1, offsets_B1 = upload([ends, firsts], self.model.device)[..., None]
        columns_BU = ends_B1 + torch.arange(num_slots, device=self.model.device)
        length = max(ends) + num_slots
        mask = None
        if min(ends) < max(ends):  # every slot of a row sees up to the row's last
            last_BU = columns_BU[:, -1:].expand_as(columns_BU)
            mask = chain_mask(last_BU, length, self.model.dtype)
        lengths = [end + num_slots for end in ends]
        attend = cached(shape.layer, self.cache.layers, columns_BU, length, mask, lengths)
        tokens_BU = fill_blocks(shape, roots_B1[:, 0], num_slots)
        embeddings_ME = self.target.embed(tokens_BU.flatten())
        positions_M = self.positions(columns_BU, offsets_B1)
        hidden_BUE = self.model.forward(embeddings_ME, positions_M, attend).view(*tokens_BU.shape, -1)
        return BlockLevels(self, hidden_BUE[:, shape.first_slot :], roots_B1)

    def _read_missing(self, context: DraftContext) -> None:
        _, copies = self.restart(context)
        sharing = {slot for _, slot in copies}
        wanted = [len(tokens) - 1 - first for tokens, first in zip(context.tokens, self.firsts, strict=False)]
        self.hold(len(wanted), max(wanted) + self.spare)
        missing = [
            (slot, self.counts[slot], num)
            for slot, num in enumerate(wanted)
            if slot not in sharing and num > self.counts[slot]
        ]
        for group in prefill_groups(missing, lambda part: part[2] - part[1]):
            entries = [(slot, column) for slot, start, end in group for column in range(start, end)]
            slots_N, columns_N, positions_N = upload(
                [(slot, column, self.firsts[slot] + column) for slot, column in entries], self.model.device
            ).unbind(1)
            context_kv = self.model.context(self.history.gather(slots_N, positions_N), positions_N)
            for layer_SKLD, kv_NKD in zip(self.cache.layers, context_kv, strict=True):
                layer_SKLD[slots_N, :, columns_N] = kv_NKD
            for slot, _, end in group:
                self.counts[slot] = end
        self.share(copies)


class BlockLevels(Levels):
    """hidden_BDE: of the slots that propose, one per level."""

    def __init__(self, blocks: BlockCache, hidden_BDE: Tensor, roots_B1: Tensor) -> None:
        self.blocks, self.hidden_BDE, self.roots_B1 = blocks, hidden_BDE, roots_B1
        num_rows, depth = hidden_BDE.shape[:2]
        self.level = 0
        self.logits_BDV = self._head(hidden_BDE) if num_rows * depth <= _ROWS_AT_ONCE else None

    def first(self) -> Tensor:
        return self._logits(self.roots_B1)

    def next(self, tokens_BF: Tensor, parents_BF: Tensor | None) -> Tensor:
        self.level += 1
        return self._logits(tokens_BF)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.blocks.model.logits(hidden, self.blocks.target)

    def _logits(self, tokens_BF: Tensor) -> Tensor:
        slot = slice(self.level, self.level + 1)
        known_BDV = self.logits_BDV
        logits_B1V = self._head(self.hidden_BDE[:, slot]) if known_BDV is None else known_BDV[:, slot]
        bias_BFV = self.blocks.model.bias(tokens_BF)
        return logits_B1V.expand(-1, tokens_BF.shape[1], -1) if bias_BFV is None else logits_B1V + bias_BFV
