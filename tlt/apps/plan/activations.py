"""What autograd keeps of the update's forward, counted on the meta device by the code of each family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tlt.apps.plan.sizes import META
from tlt.base.config.lora import LoraSection
from tlt.models.any_config import AnyConfig
from tlt.models.attention_form import PLAIN, QUERIES_AT_ONCE, AttentionForm
from tlt.models.decoder import ModelConfig, Policy
from tlt.models.lora import add_adapters
from tlt.models.new import new_transformer

TOKENS = 64


@dataclass(frozen=True)
class Kept:
    """values, in_half: per token, in float32 and in bfloat16, where transformers' norms keep float32 as well.
    fixed: whatever the tokens, such as experts summed with their adapters.
    """

    values: float
    in_half: float
    fixed: int
    forms: tuple[AttentionForm, ...]

    def per_token(self, size: int) -> float:
        """Returns bytes, scores aside. size: bytes of a value."""
        return size * (self.in_half if size == 2 else self.values)

    def scores(self, length: int, num_heads: int, size: int, has_kernel: bool) -> list[float]:
        """Returns bytes per token of each layer. has_kernel: for windows."""
        return [_scores(form, length, num_heads, size, has_kernel) for form in self.forms]


def _scores(form: AttentionForm, length: int, num_heads: int, size: int, has_kernel: bool) -> float:
    if form.is_plain_within(length):
        return 0
    keys = (length + min(length, QUERIES_AT_ONCE)) / 2
    if form.window is not None:
        keys = min(keys, form.window + QUERIES_AT_ONCE)
    if form.softcap is None and form.sinks_H is None:
        return 0 if has_kernel else keys * size  # a mask
    weights = 6 if size == 2 else size  # softmax in float32, and rounded
    return keys * num_heads * (weights + (size if form.softcap is not None else 0))


@lru_cache
def count_kept(config: ModelConfig, lora: LoraSection) -> Kept:
    with META:
        model = new_transformer(config, torch.bfloat16)  # the only dtype of grouped products there
    if lora.is_used:
        add_adapters(model, lora, torch.float32)
    once, twice = _forward(model, TOKENS), _forward(model, 2 * TOKENS)
    values, half = (twice.values - once.values) / TOKENS, (twice.in_half - once.in_half) / TOKENS
    if not isinstance(config, AnyConfig):
        half = values  # a norm of ours is one kernel on a GPU
    return Kept(values, half, int(2 * once.values - twice.values), once.forms)


def _forward(model: Policy, num_tokens: int) -> Kept:
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
    forms: list[AttentionForm] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage, tensor.dtype
        return tensor

    def attend(layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        forms.append(form)
        attended: Tensor = _Attention.apply(qkv_NSD, model.config.num_heads)  # type: ignore[no-untyped-call]
        return attended

    with META, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(num_tokens, dtype=torch.long), torch.arange(num_tokens), attend)
    in_float = sum(s.nbytes() // (d.itemsize if d.is_floating_point else 4) for s, d in kept.values())
    return Kept(in_float, sum(s.nbytes() for s, _ in kept.values()) / 2, 0, tuple(forms))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NSD: Tensor, num_heads: int) -> Tensor:
        attended_NA = qkv_NSD.new_empty(len(qkv_NSD), num_heads * qkv_NSD.shape[2])
        ctx.save_for_backward(qkv_NSD, attended_NA.clone())
        return attended_NA
