"""What a layer's attention has beyond softmax(q·k / √D)·v over all earlier tokens.

scale      Gemma, Granite                   softcap    Gemma 2
window     Mistral, Gemma, OLMo 3, gpt-oss  sinks      gpt-oss
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES_AT_ONCE = 1024
"""Bounds the scores that a form in plain PyTorch keeps."""


@dataclass(frozen=True, eq=False)
class AttentionForm:
    """scale: of the scores; None: 1 / √D.
    window: a token sees the last `window` tokens, itself included; None: all.
    softcap: scores become softcap · tanh(scores / softcap).
    sinks_H: a score per head that takes weight and adds no value.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def is_plain_within(self, length: int) -> bool:
        is_wide = self.window is None or self.window >= length
        return is_wide and self.softcap is None and self.sinks_H is None


PLAIN = AttentionForm()


def attend_masked(
    q_BHTD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, form: AttentionForm, hidden_BTL: Tensor | None
) -> Tensor:
    """[B, H, T, D]. hidden_BTL: keys that a query does not see, the window's included; None: it sees all."""
    H, K = q_BHTD.shape[1], k_BKLD.shape[1]
    hidden_B1TL = None if hidden_BTL is None else hidden_BTL[:, None]
    if form.softcap is None and form.sinks_H is None:
        mask = None if hidden_B1TL is None else ~hidden_B1TL
        if K < H:
            k_BKLD, v_BKLD = (x.repeat_interleave(H // K, dim=1) for x in (k_BKLD, v_BKLD))
        return F.scaled_dot_product_attention(q_BHTD, k_BKLD, v_BKLD, mask, scale=form.scale)
    k_BHLD, v_BHLD = (x.repeat_interleave(H // K, dim=1) for x in (k_BKLD, v_BKLD))
    scale = q_BHTD.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = q_BHTD @ k_BHLD.transpose(2, 3) * scale
    if form.softcap is not None:
        scores = (scores / form.softcap).tanh() * form.softcap
    if hidden_B1TL is not None:
        scores = scores.masked_fill(hidden_B1TL, float("-inf"))
    if form.sinks_H is not None:
        sinks = form.sinks_H.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return weights[..., : k_BHLD.shape[2]] @ v_BHLD


def attend_causal(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, form: AttentionForm) -> Tensor:
    """[H, T, D] of one sequence."""
    length, device = q_HTD.shape[1], q_HTD.device
    parts = []
    for start in range(0, length, QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, length)
        first = 0 if form.window is None else max(0, start - form.window + 1)
        query_T1, key_L = (
            torch.arange(start, end, device=device)[:, None],
            torch.arange(first, end, device=device),
        )
        hidden_TL = key_L > query_T1
        if form.window is not None:
            hidden_TL |= key_L <= query_T1 - form.window
        q, k, v = q_HTD[None, :, start:end], k_KTD[None, :, first:end], v_KTD[None, :, first:end]
        parts.append(attend_masked(q, k, v, form, hidden_TL[None])[0])
    return torch.cat(parts, dim=1)
