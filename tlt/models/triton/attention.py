"""Attention on a GPU with equal rows: one kernel for a token, a chain, a tree, a prompt and a packed batch.

    a program: some queries of an item, all query heads of one key head
      KEYS keys at a time, from position 0 to the last that a query sees ─▶ scores ─▶ online softmax (arXiv
      1805.02867) ─▶ sums of weights and of weighted values, both by the instruction that multiplies matrices

Keys come in the order of positions, also on a tree's path: only then are they summed as a chain's are. All
sums are that instruction's, so the number of queries in a program is free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
"""A program has fewer than 64 rows: see products.py."""

EVERYTHING = 2**40
"""A prefix without a tail."""


def keys_at_once(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.bfloat16 else 16


class Items(NamedTuple):
    """Queries that follow one another and see the same keys, each up to its own.

    table_I6: int64, per item: first query in the flat batch · number of queries · position of the first ·
        where keys begin, in elements · prefix: keys whose column is their position · where the columns of
        later keys begin in `tail`.
    most: queries of an item.
    """

    table_I6: Tensor
    tail: Tensor
    most: int


def attend(q_NHD: Tensor, k_XKLD: Tensor, v_XKLD: Tensor, items: Items, scale: float | None = None) -> Tensor:
    """Returns [N, H · D], undefined for queries of no item. k, v: [slots, kv heads, columns, D], of equal
    strides. scale: None: 1 / √D."""
    (num_queries, num_heads, head_dim), num_kv_heads = q_NHD.shape, k_XKLD.shape[1]
    assert k_XKLD.stride() == v_XKLD.stride()
    out_NHD = q_NHD.new_empty(num_queries, num_heads, head_dim)
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    rows = 16 if items.most * padded <= 16 else 32
    queries = max(rows // padded, 1)
    with torch.cuda.device_of(q_NHD):
        # the first axis alone is longer than 65,535, as a prompt's blocks may be
        attend_kernel[triton.cdiv(items.most, queries), len(items.table_I6), num_kv_heads](
            q_NHD,
            (k_XKLD, v_XKLD, head_dim**-0.5 if scale is None else scale),
            out_NHD,
            (items.table_I6, items.tail),
            (q_NHD.stride(0), k_XKLD.stride(1), k_XKLD.stride(2)),
            SHAPE=(queries, group, padded, head_dim),
            BLOCK=max(triton.next_power_of_2(head_dim), 16),
            KEYS=keys_at_once(q_NHD.dtype),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out_NHD.flatten(1)


@triton.jit
def attend_kernel(
    q_ptr, kv, out_ptr, items, strides, SHAPE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    QUERIES: tl.constexpr = SHAPE[0]
    GROUP: tl.constexpr = SHAPE[1]
    PADDED: tl.constexpr = SHAPE[2]
    SIZE: tl.constexpr = SHAPE[3]
    k_ptr, v_ptr, scale = kv
    table_ptr, tail_ptr = items
    q_stride, head_stride, column_stride = strides
    item_ptr = table_ptr + 6 * tl.program_id(1)
    first_of_item, count, position = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    begin, prefix, tail = tl.load(item_ptr + 3), tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    kv_head, first = tl.program_id(2).to(tl.int64), tl.program_id(0) * QUERIES
    if first < count:
        row, d, key = tl.arange(0, QUERIES * PADDED), tl.arange(0, BLOCK), tl.arange(0, KEYS)
        query, head = row // PADDED, row % PADDED
        is_real = ((first + query < count) & (head < GROUP))[:, None] & (d < SIZE)[None, :]
        start = first_of_item + first
        q_ptr += start * q_stride + kv_head * GROUP * SIZE
        q = tl.load(q_ptr + (query * q_stride + head * SIZE)[:, None] + d[None, :], is_real, 0.0)
        k_ptr += begin + kv_head * head_stride
        v_ptr += begin + kv_head * head_stride
        largest = tl.full((QUERIES * PADDED,), -float("inf"), tl.float32)
        totals = tl.zeros((QUERIES * PADDED, 16), tl.float32)
        sums = tl.zeros((QUERIES * PADDED, BLOCK), tl.float32)
        ones = tl.full((KEYS, 16), 1.0, v_ptr.dtype.element_ty)
        last = (position + first + query).to(tl.int32)  # key that a query sees
        end = (position + tl.minimum(first + QUERIES, count)).to(tl.int32)
        for begin_of_block in range(0, end, KEYS):
            at = begin_of_block + key
            column = tl.load(tail_ptr + tail + at - prefix, (at >= prefix) & (at < end), 0)
            offset = tl.where(at < prefix, at, column.to(tl.int32)).to(tl.int64) * column_stride
            is_key = (at < end)[:, None] & (d < SIZE)[None, :]
            k = tl.load(k_ptr + offset[:, None] + d[None, :], is_key, 0.0)
            v = tl.load(v_ptr + offset[:, None] + d[None, :], is_key, 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(at[None, :] <= last[:, None], scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            factor, largest = tl.exp(largest - larger)[:, None], larger
            weights = tl.exp(scores - larger[:, None]).to(v.dtype)
            totals = tl.dot(weights, ones, totals * factor, input_precision="ieee")
            sums = tl.dot(weights, v, sums * factor, input_precision="ieee")
        out = sums / tl.max(totals, 1)[:, None]
        out_ptr += (start * tl.num_programs(2) + kv_head) * GROUP * SIZE
        out_ptrs = out_ptr + ((query * tl.num_programs(2) * GROUP + head) * SIZE)[:, None] + d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), is_real)
