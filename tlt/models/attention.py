"""Who looks at whom: attention for packed sequences and for cached ones, plain SDPA throughout.

Each object here is an `Attend` (see transformer.py) made for one forward. Faster kernels stand beside these and must
agree with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models.transformer import ModelConfig


class PackedCausal:
    """Several sequences in one flat batch, each causal and blind to the others (training, recomputation, prefill).

    Attention runs sequence by sequence: no mask, no padding, and "packed equals unpacked" holds by construction.
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        outputs = []
        for qkv_TSD in qkv_NSD.split(self.lengths):
            q, k, v = (part.transpose(0, 1)[None] for part in qkv_TSD.split(heads, dim=1))
            out_1HTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)
            outputs.append(out_1HTD[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


class Unrolled(PackedCausal):
    """Packed causal attention of a drafter that is trained on several of its own steps, one call per step: in the first,
    pair t sees the pairs up to t of its sequence; in later ones it is the successor of what it was in the step before, and
    sees what it saw at first and itself in every step since. So each pair lives through what a draft from there would see
    (HASS, arXiv 2408.15766, §3.2; EAGLE-3, arXiv 2503.01840, §3.2)."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        super().__init__(config, lengths)
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        q_NHD, k_NKD, v_NKD = qkv_NSD.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        group = self.num_heads // self.num_kv_heads
        k_NHD, v_NHD = (x.repeat_interleave(group, dim=1) for x in (k_NKD, v_NKD))
        self.steps.append((k_NHD, v_NHD))
        if len(self.steps) == 1:
            return super().__call__(layer, qkv_NSD)
        (first_k, first_v), own = self.steps[0], self.steps[1:]
        q_NHD = q_NHD * q_NHD.shape[-1] ** -0.5
        own_NHI = torch.stack([(q_NHD * k_NHD).sum(-1) for k_NHD, _ in own], dim=-1)
        outputs = []
        parts = zip(*(x.split(self.lengths) for x in (q_NHD, first_k, first_v, own_NHI)), strict=True)
        for start, (q_THD, k_THD, v_THD, own_THI) in zip(accumulate([0, *self.lengths]), parts, strict=False):
            length = len(q_THD)
            scores_HTT = q_THD.transpose(0, 1) @ k_THD.permute(1, 2, 0)
            future = torch.ones(length, length, dtype=torch.bool, device=scores_HTT.device).triu_(1)
            scores_HTL = torch.cat([scores_HTT.masked_fill(future, float("-inf")), own_THI.transpose(0, 1)], dim=-1)
            weights_HTL = scores_HTL.softmax(dim=-1)
            out_HTD = weights_HTL[..., :length] @ v_THD.transpose(0, 1)
            for i, (_, v_NHD) in enumerate(own):
                own_v_HTD = v_NHD[start : start + length].transpose(0, 1)
                out_HTD = out_HTD + weights_HTL[..., length + i, None] * own_v_HTD
            outputs.append(out_HTD.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


class StoringPrefill(PackedCausal):
    """Packed causal attention that also leaves keys and values in cache slots, from position 0 on."""

    def __init__(
        self, config: ModelConfig, lengths: Sequence[int], layers_SKLD: Sequence[Tensor], slots: Sequence[int]
    ) -> None:
        super().__init__(config, lengths)
        self.layers, self.slots = layers_SKLD, list(slots)

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        kv_by_sequence = qkv_NSD[:, self.num_heads :].split(self.lengths)
        for slot, kv_TKD in zip(self.slots, kv_by_sequence, strict=True):
            self.layers[layer][slot, :, : len(kv_TKD)] = kv_TKD.transpose(0, 1)
        return super().__call__(layer, qkv_NSD)


class Cached:
    """T new tokens for each of B sequences against their cache; writes the new keys and values first.

    layers_SKLD: per layer, [slots, 2 × kv heads, length, head dim], keys before values.
    The sequences lie in slots 0..B-1. `columns_BT` says where the new entries go; `mask_BTL` (additive, or None when
    every new token may see all of `length`) who sees what. Heads that share keys are folded into the query length.
    """

    def __init__(
        self, config: ModelConfig, layers_SKLD: Sequence[Tensor], columns_BT: Tensor, length: int, mask_BTL: Tensor | None
    ) -> None:
        self.layers, self.length = layers_SKLD, length
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.batch, self.num_new = columns_BT.shape
        self.columns_BT = columns_BT
        self.rows_B1 = torch.arange(self.batch, device=columns_BT.device)[:, None]
        self.mask = None if mask_BTL is None else mask_BTL.repeat(1, self.group, 1)[:, None]

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        B, T, K, G = self.batch, self.num_new, self.num_kv_heads, self.group
        cache_SKLD = self.layers[layer]
        qkv_BTSD = qkv_NSD.view(B, T, qkv_NSD.shape[1], -1)
        cache_SKLD[self.rows_B1, :, self.columns_BT] = qkv_BTSD[:, :, self.num_heads :]
        live_BKLD = cache_SKLD[:B, :, : self.length]
        q_BKTD = qkv_BTSD[:, :, : self.num_heads].unflatten(2, (K, G)).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, -1)
        out_BKTD = F.scaled_dot_product_attention(q_BKTD, live_BKLD[:, :K], live_BKLD[:, K:], attn_mask=self.mask)
        return out_BKTD.view(B, K, G, T, -1).permute(0, 3, 1, 2, 4).reshape(B * T, -1)


def padding_mask(lengths_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, 1, length]: a decoding token sees the first `lengths_B` entries, its own included."""
    hidden = torch.arange(length, device=lengths_B.device) >= lengths_B[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=lengths_B.device).masked_fill_(hidden, float("-inf"))[:, None]
