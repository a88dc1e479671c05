"""Who looks at whom: attention for packed sequences and for cached ones, plain SDPA throughout.

Each object here is an `Attend` (see transformer.py) made for one forward. Faster kernels stand beside these and must
agree with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        self.first_NHD: tuple[Tensor, Tensor] | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        q_NHD, k_NKD, v_NKD = qkv_NSD.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        group = self.num_heads // self.num_kv_heads
        k_NHD, v_NHD = (x.repeat_interleave(group, dim=1) for x in (k_NKD, v_NKD))
        if self.first_NHD is None:
            self.first_NHD = k_NHD, v_NHD
            return super().__call__(layer, qkv_NSD)
        self.own_keys.append(k_NHD)
        self.own_values.append(v_NHD)
        whole = (q_NHD, *self.first_NHD, torch.stack(self.own_keys, dim=1), torch.stack(self.own_values, dim=1))
        is_fused = q_NHD.device.type == "cpu" and q_NHD.dtype in (torch.float32, torch.float64)
        attend = _CausalAndOwn.apply if is_fused else causal_and_own
        outputs = []
        for q_THD, k_THD, v_THD, own_k_TIHD, own_v_TIHD in zip(*(x.split(self.lengths) for x in whole), strict=True):
            q_HTD, k_HTD, v_HTD = (x.transpose(0, 1) for x in (q_THD, k_THD, v_THD))
            own_k_IHTD, own_v_IHTD = (x.permute(1, 2, 0, 3) for x in (own_k_TIHD, own_v_TIHD))
            out_HTD = attend(q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD)
            outputs.append(out_HTD.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def causal_and_own(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, own_k_IHTD: Tensor, own_v_IHTD: Tensor) -> Tensor:
    """Query t sees the keys up to t, and the keys at t of each of the I own steps."""
    q_HTD = q_HTD * q_HTD.shape[-1] ** -0.5
    length = q_HTD.shape[1]
    future_TT = torch.ones(length, length, dtype=torch.bool, device=q_HTD.device).triu_(1)
    scores_HTT = (q_HTD @ k_HTD.transpose(1, 2)).masked_fill(future_TT, float("-inf"))
    own_HTI = (q_HTD * own_k_IHTD).sum(-1).movedim(0, -1)
    weights_HTL = torch.cat([scores_HTT, own_HTI], dim=-1).softmax(dim=-1)
    own_IHT1 = weights_HTL[..., length:].movedim(-1, 0)[..., None]
    return weights_HTL[..., :length] @ v_HTD + (own_IHT1 * own_v_IHTD).sum(0)


class _CausalAndOwn(torch.autograd.Function):
    """`causal_and_own` without its T x T matrices: the flash kernel handles the first keys, and the own ones join by
    log-sum-exp. Its backward takes output and log-sum-exp of the whole, with which its probabilities and its correction
    term (Dao, arXiv 2307.08691, §2.3) are those of the whole softmax."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD = tensors
        scale = q_HTD.shape[-1] ** -0.5
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        first_1HTD, lse_1HT = flash(q_HTD[None], k_HTD[None], v_HTD[None], 0.0, True, scale=scale)
        own_IHT = (q_HTD * own_k_IHTD).sum(-1) * scale
        whole_1HT = torch.cat([lse_1HT, own_IHT]).logsumexp(0, keepdim=True)
        own_IHT1 = (own_IHT - whole_1HT).exp()[..., None]
        out_HTD: Tensor = (lse_1HT - whole_1HT).exp()[0, ..., None] * first_1HTD[0] + (own_IHT1 * own_v_IHTD).sum(0)
        ctx.save_for_backward(*tensors, out_HTD, whole_1HT, own_IHT1)
        return out_HTD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD, out_HTD, whole_1HT, own_IHT1 = ctx.saved_tensors
        (d_HTD,) = gradients
        scale = q_HTD.shape[-1] ** -0.5
        lse_1HT = torch.empty_like(whole_1HT.transpose(1, 2)).transpose(1, 2).copy_(whole_1HT)  # the kernel's own layout
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        first = (q_HTD[None], k_HTD[None], v_HTD[None], out_HTD[None])
        dq_1HTD, dk_1HTD, dv_1HTD = flash(d_HTD[None], *first, lse_1HT, 0.0, True, scale=scale)
        correction_HT1 = (d_HTD * out_HTD).sum(-1, keepdim=True)
        d_scores_IHT1 = own_IHT1 * ((d_HTD * own_v_IHTD).sum(-1, keepdim=True) - correction_HT1) * scale
        dq_HTD = dq_1HTD[0] + (d_scores_IHT1 * own_k_IHTD).sum(0)
        return dq_HTD, dk_1HTD[0], dv_1HTD[0], d_scores_IHT1 * q_HTD, own_IHT1 * d_HTD


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


_MIN_WASTE = 300_000
"""Multiplications with keys that nobody may see, per sequence, from which a call for each sequence is cheaper (docs/log.md)."""
_QUERIES_PER_READ = 6
"""Reading a key from memory takes as long as so many queries to it."""


class Cached:
    """T new tokens for each of B sequences against their cache; writes the new keys and values first.

    layers_SKLD: per layer, [slots, 2 × kv heads, length, head dim], keys before values.
    The sequences lie in slots 0..B-1. `columns_BT` says where the new entries go; `mask_BTL` (additive, or None when
    every new token may see all of `length`) who sees what. Heads that share keys are folded into the query length.
    lengths: per sequence, the columns that any of its tokens may see. On a CPU a very ragged batch then goes sequence by
        sequence instead of paying for its longest one everywhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers_SKLD: Sequence[Tensor],
        columns_BT: Tensor,
        length: int,
        mask_BTL: Tensor | None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.layers, self.length = layers_SKLD, length
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.batch, self.num_new = columns_BT.shape
        self.columns_BT = columns_BT
        self.rows_B1 = torch.arange(self.batch, device=columns_BT.device)[:, None]
        self.mask = None if mask_BTL is None else mask_BTL.repeat(1, self.group, 1)[:, None]
        self.lengths: Sequence[int] | None = None
        if lengths is not None and columns_BT.device.type == "cpu":
            num_queries = max(self.num_new, _QUERIES_PER_READ) * config.num_heads
            wasted = sum(length - n for n in lengths) * num_queries * config.head_dim
            if wasted > _MIN_WASTE * self.batch:
                self.lengths = lengths

    def __call__(self, layer: int, qkv_NSD: Tensor) -> Tensor:
        B, T, K, G = self.batch, self.num_new, self.num_kv_heads, self.group
        cache_SKLD = self.layers[layer]
        qkv_BTSD = qkv_NSD.view(B, T, qkv_NSD.shape[1], -1)
        cache_SKLD[self.rows_B1, :, self.columns_BT] = qkv_BTSD[:, :, self.num_heads :]
        live_BKLD = cache_SKLD[:B, :, : self.length]
        q_BKTD = qkv_BTSD[:, :, : self.num_heads].unflatten(2, (K, G)).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, -1)
        if self.lengths is None:
            out_BKTD = F.scaled_dot_product_attention(q_BKTD, live_BKLD[:, :K], live_BKLD[:, K:], attn_mask=self.mask)
        else:
            out_BKTD = torch.cat([self._row(b, n, q_BKTD, live_BKLD) for b, n in enumerate(self.lengths)])
        return out_BKTD.view(B, K, G, T, -1).permute(0, 3, 1, 2, 4).reshape(B * T, -1)

    def _row(self, row: int, length: int, q_BKTD: Tensor, live_BKLD: Tensor) -> Tensor:
        live_KLD = live_BKLD[row : row + 1, :, :length]
        mask = None if self.mask is None or self.num_new == 1 else self.mask[row : row + 1, ..., :length]
        k_1KLD, v_1KLD = live_KLD.chunk(2, dim=1)
        return F.scaled_dot_product_attention(q_BKTD[row : row + 1], k_1KLD, v_1KLD, attn_mask=mask)


def padding_mask(lengths_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, 1, length]: a decoding token sees the first `lengths_B` entries, its own included."""
    hidden = torch.arange(length, device=lengths_B.device) >= lengths_B[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=lengths_B.device).masked_fill_(hidden, float("-inf"))[:, None]
