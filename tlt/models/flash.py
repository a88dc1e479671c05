"""Causal attention within many packed sequences by one kernel, on a GPU in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import varlen

from tlt.base.uploads import upload
from tlt.models.attention_form import AttentionForm

MOST_HEAD_DIM, EVEN_HEAD_DIM = 256, 8


def serves(qkv_NSD: Tensor, form: AttentionForm) -> bool:
    """A window is the kernel's, a softcap and sinks are not."""
    is_half = qkv_NSD.dtype in (torch.bfloat16, torch.float16)
    is_known = form.softcap is None and form.sinks_H is None
    head_dim = qkv_NSD.shape[-1]
    is_size = head_dim <= MOST_HEAD_DIM and head_dim % EVEN_HEAD_DIM == 0
    return qkv_NSD.is_cuda and is_half and is_known and is_size and has_kernel()


@cache
def has_kernel() -> bool:
    return torch.cuda.get_device_capability()[0] >= 8 and torch.version.hip is None


class PackedLengths:
    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = max(lengths)
        self.starts = upload([0, *accumulate(lengths)], device, torch.int32)


def attend_packed(
    qkv_NSD: Tensor, num_heads: int, num_kv_heads: int, lengths: PackedLengths, form: AttentionForm
) -> Tensor:
    q_NHD, k_NKD, v_NKD = qkv_NSD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    options: dict[str, Any] = {}
    if num_heads != num_kv_heads and _takes_groups():
        options["enable_gqa"] = True
    elif num_heads != num_kv_heads:
        k_NKD, v_NKD = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k_NKD, v_NKD))
    earlier = -1 if form.window is None else form.window - 1
    starts, longest = lengths.starts, lengths.longest
    out_NHD = varlen.varlen_attn(
        q_NHD.contiguous(), k_NKD.contiguous(), v_NKD.contiguous(), starts, starts, longest, longest,
        scale=form.scale, window_size=(earlier, 0), **options,
    )  # fmt: skip
    return cast(Tensor, out_NHD).flatten(1)


@cache
def _takes_groups() -> bool:
    """PyTorch 2.11's has no such argument."""
    return "enable_gqa" in signature(varlen.varlen_attn).parameters
