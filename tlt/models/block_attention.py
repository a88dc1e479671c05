"""Attention of blocks of tokens that are drafted at once (DFlash's backbone).

    sequence   0 1 2 3 4 5 6 7           a block sees the sequence before its anchor, and all of itself
    block      . . . a m m m             a: its anchor, which stands at position 3; it sees 0 1 2

Blocks are invisible to each other and to the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.models.decoder import ModelConfig


class BlockAttention:
    """context: per layer, the rotated keys and the values of the packed sequences, [N, 2 × kv heads, D]."""

    def __init__(
        self,
        config: ModelConfig,
        context: Sequence[Tensor],
        lengths: Sequence[int],
        anchors: Sequence[Sequence[int]],
        block_size: int,
    ) -> None:
        self.context, self.lengths, self.anchors, self.block_size = context, lengths, anchors, block_size
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        blocks = qkv_NSD.split([len(places) * self.block_size for places in self.anchors])
        sequences = self.context[layer].split(list(self.lengths))
        parts = zip(blocks, sequences, self.anchors, strict=True)
        return torch.cat([self._attend(*part) for part in parts if part[2]])

    def _attend(self, qkv_MSD: Tensor, context_TSD: Tensor, places: Sequence[int]) -> Tensor:
        """[M, H·D] of one sequence's blocks. A: blocks, U: tokens of each, G: query heads per key head."""
        A, U, K, D = len(places), self.block_size, self.num_kv_heads, qkv_MSD.shape[-1]
        q_MHD, k_MKD, v_MKD = qkv_MSD.split([self.num_heads, K, K], dim=1)
        q_KAGUD = (q_MHD * D**-0.5).view(A, U, K, -1, D).permute(2, 0, 3, 1, 4)
        own_k_KAUD, own_v_KAUD = (x.view(A, U, K, D).permute(2, 0, 1, 3) for x in (k_MKD, v_MKD))
        k_KTD, v_KTD = context_TSD.transpose(0, 1).chunk(2)
        T, device = context_TSD.shape[0], qkv_MSD.device
        hidden_AT = torch.arange(T, device=device) >= upload(list(places), device)[:, None]
        scores_KAGUT = (q_KAGUD.reshape(K, -1, D) @ k_KTD.transpose(1, 2)).view(K, A, -1, U, T)
        scores_KAGUT = scores_KAGUT.masked_fill(hidden_AT[:, None, None], float("-inf"))
        own_KAGUU = (q_KAGUD.flatten(2, 3) @ own_k_KAUD.transpose(2, 3)).view(K, A, -1, U, U)
        weights = torch.cat([scores_KAGUT, own_KAGUU], dim=-1).softmax(dim=-1)
        before_KAGUD = (weights[..., :T].reshape(K, -1, T) @ v_KTD).view(q_KAGUD.shape)
        own_KAGUD = (weights[..., T:].flatten(2, 3) @ own_v_KAUD).view(q_KAGUD.shape)
        attended: Tensor = (before_KAGUD + own_KAGUD).permute(1, 3, 0, 2, 4).reshape(A * U, -1)
        return attended
