"""The engine's copy of a decoder on a GPU with equal rows: a row's bits depend on no other row, and not on
whether it is prompt, decoding or verification.

    products     triton/products.py      attention    triton/attention.py, over cache or packed batch
    norms, MLP   triton/rows.py          the rest     PyTorch's operations on one element at a time

Attention over a cache writes keys and values first, a prompt's too, then reads them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.models.attention import Cached, PackedCausal, SharedPrompts, StoringPrefill, Unrolled
from tlt.models.attention_form import PLAIN, AttentionForm
from tlt.models.decoder import Attend, ModelConfig
from tlt.models.kv_budget import MOST_TOKENS
from tlt.models.packed import PackedLayer, PackedLinear, PackedNorm, PackedTransformer

if TYPE_CHECKING:
    from tlt.models.triton.attention import Items


class EqualNorm(PackedNorm):
    def __call__(self, x_NE: Tensor) -> Tensor:
        from tlt.models.triton.rows import rms_norm

        return rms_norm(x_NE[:, None], self.weight[None], self.eps)[:, 0]


class EqualLinear(PackedLinear):
    has_panels = False

    def __call__(self, x_NI: Tensor) -> Tensor:
        from tlt.models.triton.products import multiply

        assert self.weight is not None
        return multiply(x_NI, self.weight, self.bias)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        from tlt.models.triton.products import multiply

        assert self.weight is not None
        return multiply(x_NI, self.weight, residual_NO)


class EqualLayer(PackedLayer):
    norm_type, linear_type = EqualNorm, EqualLinear

    def norm_heads(self, qk_NHD: Tensor, weight_HD: Tensor) -> None:
        from tlt.models.triton.rows import rms_norm

        rms_norm(qk_NHD, weight_HD, self.config.rms_norm_eps, out_NHD=qk_NHD)

    def add_mlp(self, x_NE: Tensor) -> Tensor:
        from tlt.models.triton.rows import swiglu

        return self.down_linear.add_to(x_NE, swiglu(self.gate_up_linear(self.mlp_norm(x_NE))))


class EqualTransformer(PackedTransformer):
    layer_type = EqualLayer

    def forward_capturing(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        attend = EqualAttention(attend, self.config)
        return super().forward_capturing(token_ids_N, positions_N, attend, capture)


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────


class EqualAttention:
    """Attends as `attention` does, one of attention.py."""

    def __init__(self, attention: Attend, config: ModelConfig) -> None:
        self.attention, self.num_heads, self.num_kv_heads = attention, config.num_heads, config.num_kv_heads
        self.plan: tuple[Items, Stored | None] | None = None

    def __call__(self, layer: int, qkv_NSD: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        from tlt.models.triton.attention import attend

        assert form.is_plain_within(MOST_TOKENS), "check_equal_rows refuses other models"
        self.plan = self.plan or _plan(self.attention, qkv_NSD)
        items, stored = self.plan
        new_NKD = qkv_NSD[:, self.num_heads :]
        kv_SKLD = new_NKD.transpose(0, 1)[None]
        if stored is not None:
            kv_SKLD = stored.layers[layer]
            kv_SKLD[stored.slots, :, stored.columns] = (
                new_NKD if stored.tokens is None else new_NKD[stored.tokens]
            )
        k_SKLD, v_SKLD = kv_SKLD.split(self.num_kv_heads, dim=1)
        return attend(qkv_NSD[:, : self.num_heads], k_SKLD, v_SKLD, items, form.scale)


class Stored(NamedTuple):
    """tokens: of the flat batch; None: all, in order."""

    layers: Sequence[Tensor]
    tokens: Tensor | None
    slots: Tensor
    columns: Tensor


def _plan(attention: Attend, qkv_NSD: Tensor) -> tuple[Items, Stored | None]:
    if isinstance(attention, Cached):
        stored = Stored(
            attention.layers, None, attention.rows.expand_as(attention.columns), attention.columns
        )
        if stored.slots.dim() == 2:
            stored = stored._replace(slots=stored.slots.flatten(), columns=stored.columns.flatten())
        is_tree = attention.positions_BT is not attention.columns_BT
        return (_tree_items if is_tree else _chain_items)(attention), stored
    assert isinstance(attention, PackedCausal), f"{type(attention)} has no equal rows"
    assert not isinstance(attention, Unrolled), "of a drafter's training"
    families = [(length, [0]) for length in attention.lengths]
    if isinstance(attention, SharedPrompts):
        families = [(prompt, own or [0]) for prompt, own in attention.families]
    if isinstance(attention, StoringPrefill):
        return _items_in_cache(families, attention, qkv_NSD.device)
    return _items_in_batch(families, qkv_NSD), None


def _chain_items(cached: Cached) -> Items:
    from tlt.models.triton.attention import EVERYTHING, Items

    (B, T), columns_BT = cached.columns_BT.shape, cached.columns_BT
    counts_B = torch.full_like(columns_BT[:, 0], T)
    if cached.real_N is not None:
        counts_B = torch.zeros_like(counts_B)
        counts_B.scatter_add_(0, cached.real_N // T, torch.ones_like(cached.real_N))
    begins_B = torch.arange(B, device=columns_BT.device) * cached.layers[0].stride(0)
    everything_B, no_tail_B = torch.full_like(counts_B, EVERYTHING), torch.zeros_like(counts_B)
    first_B, position_B = counts_B.cumsum(0) - counts_B, columns_BT[:, 0]
    fields = first_B, counts_B, position_B, begins_B, everything_B, no_tail_B
    return Items(torch.stack(fields, dim=1), columns_BT, T)


def _tree_items(cached: Cached) -> Items:
    """An item is a node; its tail is its path from the root, whose columns rise with depth."""
    from tlt.models.triton.attention import Items

    (B, T), columns_BT = cached.columns_BT.shape, cached.columns_BT
    assert cached.mask_BTL is not None
    columns_BTT = columns_BT[:, None].expand(B, T, T)
    seen_BTT = cached.mask_BTL.gather(2, columns_BTT) == 0
    depths_BTT = seen_BTT.cumsum(-1) - 1
    paths_BTP = columns_BT.new_zeros(B, T, T + 1)
    paths_BTP.scatter_(2, depths_BTT.masked_fill(~seen_BTT, T), columns_BTT)  # T: of no path
    node_BT = torch.arange(B * T, device=columns_BT.device).view(B, T)
    prefix_BT = columns_BT[:, :1].expand(B, T)
    position_BT, begin_BT = prefix_BT + depths_BTT[..., -1], node_BT // T * cached.layers[0].stride(0)
    fields = node_BT, torch.ones_like(node_BT), position_BT, begin_BT, prefix_BT, node_BT * (T + 1)
    table_N6 = torch.stack(fields, dim=-1).view(B * T, 6)
    if cached.real_N is not None:
        table_N6 = table_N6[cached.real_N]
        table_N6[:, 0] = torch.arange(len(table_N6), device=table_N6.device)
    return Items(table_N6, paths_BTP, 1)


def _items_in_cache(
    families: Sequence[tuple[int, Sequence[int]]], prefill: StoringPrefill, device: torch.device
) -> tuple[Items, Stored]:
    """An item is a sequence, without the prompt that it shares with an earlier one."""
    from tlt.models.triton.attention import EVERYTHING, Items

    slot_size, slots = prefill.layers[0].stride(0), iter(prefill.slots)
    rows: list[tuple[int, ...]] = []
    stored: list[tuple[int, int, int]] = []
    start = 0
    for prompt, own in families:
        first = start
        for index, num_own in enumerate(own):
            slot, seen = next(slots), prompt if index else 0
            count = prompt + num_own - seen
            rows.append((start, count, seen, slot * slot_size, EVERYTHING, 0))
            stored += [(first + i, slot, i) for i in range(seen)]
            stored += [(start + i, slot, seen + i) for i in range(count)]
            start += count
    tokens, places, columns = upload(list(zip(*stored, strict=True)), device)
    items = Items(upload(rows, device), columns, max(count for _, count, *_ in rows))
    return items, Stored(prefill.layers, tokens, places, columns)


def _items_in_batch(families: Sequence[tuple[int, Sequence[int]]], qkv_NSD: Tensor) -> Items:
    """An item is a sequence, whose tail is what follows the prompt."""
    from tlt.models.triton.attention import Items

    rows: list[tuple[int, ...]] = []
    tail: list[int] = []
    start = 0
    for prompt, own in families:
        first = start
        for index, num_own in enumerate(own):
            seen = prompt if index else 0
            count = prompt + num_own - seen
            rows.append((start, count, seen, first * qkv_NSD.stride(0), prompt, len(tail)))
            tail += range(start - first + prompt - seen, start - first + count)
            start += count
    device = qkv_NSD.device
    return Items(upload(rows, device), upload(tail or [0], device), max(count for _, count, *_ in rows))
