"""x Wᵀ on a GPU, a row's bits independent of the other rows.

    rows of x [rows, BLOCK_K] ─┐
    rows of W [columns, BLOCK_K] ─▶ added to float32 sums ─▶ the next BLOCK_K, from the first to the last

An output is one chain of sums along K: no two programs share it, and neither BLOCK_K nor the instruction
follows the number of rows.

All tiles have two warps. With four, Triton multiplies tiles of 64 rows by wgmma and smaller ones by mma.sync,
which may round otherwise. With two, bfloat16 is mma.sync m16n8k16 at every number of rows, float32 one fused
multiply-add per element of K: tests/vllm/test_equal_rows.py reads the compiled code. Relied on is that the 16
rows of an mma.sync are computed alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 2


class Tile(NamedTuple):
    """What may follow the number of rows."""

    rows: int
    columns: int
    stages: int


def block_k(dtype: torch.dtype) -> int:
    return 128 if dtype == torch.bfloat16 else 32


def tile_of(num_rows: int, num_columns: int) -> Tile:
    """Few rows: narrow tiles, so that there are programs enough to read W at memory's speed."""
    if num_rows <= 16:
        return Tile(16, 16 if num_columns < 2**14 else 32, 5)
    if num_rows <= 32:
        return Tile(32, 32, 4)
    return Tile(64, 64, 3)


def multiply(x_NI: Tensor, weight_OI: Tensor, added: Tensor | None = None) -> Tensor:
    """x Wᵀ + added, rounded once. weight_OI: contiguous. added: a bias [O], or a residual [N, O]."""
    x_NI = x_NI if x_NI.stride(-1) == 1 else x_NI.contiguous()
    assert weight_OI.is_contiguous()
    (num_rows, num_in), num_out = x_NI.shape, len(weight_OI)
    out_NO = x_NI.new_empty(num_rows, num_out)
    tile = tile_of(num_rows, num_out)
    if num_rows == 0:
        return out_NO
    with torch.cuda.device_of(x_NI):
        multiply_kernel[triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.columns)](
            x_NI,
            weight_OI,
            added,
            out_NO,
            num_rows,
            (num_out, num_in),
            (x_NI.stride(0), 0 if added is None or added.dim() == 1 else added.stride(0)),
            TILE=(tile.rows, tile.columns, block_k(x_NI.dtype)),
            num_warps=NUM_WARPS,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out_NO


@triton.jit(do_not_specialize=("num_rows",))
def multiply_kernel(x_ptr, weight_ptr, added_ptr, out_ptr, num_rows, sizes, strides, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    num_out, num_in = sizes
    x_stride, added_stride = strides
    first_row = (tl.program_id(0) * ROWS).to(tl.int64)  # within a tile, offsets have 32 bits
    first_column = (tl.program_id(1) * COLUMNS).to(tl.int64)
    row, column, k = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, BLOCK_K)
    is_row, is_column = first_row + row < num_rows, first_column + column < num_out
    x_ptrs = x_ptr + first_row * x_stride + (row * x_stride + k[None, :])
    weight_ptrs = weight_ptr + first_column * num_in + (column * num_in + k[:, None])
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_in, BLOCK_K):
        x = tl.load(x_ptrs + first, is_row & (first + k[None, :] < num_in), 0.0)
        weight = tl.load(weight_ptrs + first, is_column & (first + k[:, None] < num_in), 0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if added_ptr is not None:
        added_ptrs = added_ptr + first_row * added_stride + first_column + (row * added_stride + column)
        sums += tl.load(added_ptrs, is_row & is_column, 0.0).to(tl.float32)
    out_ptrs = out_ptr + first_row * num_out + first_column + (row * num_out + column)
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), is_row & is_column)
