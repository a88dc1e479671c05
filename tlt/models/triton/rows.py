"""Norms and SwiGLU on a GPU: one program a row, and one order of its sums, whatever the number of rows.

A sum's order follows how threads share a row, and that follows what Triton knows of addresses. So sizes are
constants, and Triton is told nothing of strides and alignment: one machine code for all calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
POINTERS = ("x_ptr", "weight_ptr", "out_ptr")


def rms_norm(x_NHD: Tensor, weight_HD: Tensor, eps: float, out_NHD: Tensor | None = None) -> Tensor:
    """x / √(mean of x² + eps) · weight over the last axis, rounded once.
    weight_HD: contiguous. out_NHD: may be x."""
    if out_NHD is None:
        out_NHD = x_NHD.new_empty_strided(x_NHD.shape, x_NHD.stride())
    assert out_NHD.stride() == x_NHD.stride()
    num_rows, num_heads, size = x_NHD.shape
    if num_rows == 0:
        return out_NHD
    row_stride, head_stride, _ = x_NHD.stride()
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(x_NHD):
        rms_norm_kernel[num_rows, num_heads](
            x_NHD, weight_HD, out_NHD, eps, row_stride, head_stride, SIZE=size, BLOCK=block, **OPTIONS
        )
    return out_NHD


@triton.jit(do_not_specialize=("row_stride", "head_stride"), do_not_specialize_on_alignment=POINTERS)
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, row_stride, head_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    place = row * row_stride + head * head_stride + d
    x = tl.load(x_ptr + place, d < SIZE, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + head * SIZE + d, d < SIZE, 0.0).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + place, scaled.to(out_ptr.dtype.element_ty), d < SIZE)


def swiglu(gate_up_NF: Tensor) -> Tensor:
    """silu(gate) · up, rounded after silu as PyTorch does. gate_up_NF: contiguous, gates before ups."""
    num_rows, size = len(gate_up_NF), gate_up_NF.shape[1] // 2
    out_NF = gate_up_NF.new_empty(num_rows, size)
    if num_rows == 0:
        return out_NF
    with torch.cuda.device_of(gate_up_NF):
        swiglu_kernel[num_rows, triton.cdiv(size, 1024)](gate_up_NF, out_NF, size, BLOCK=1024, **OPTIONS)
    return out_NF


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + 2 * row * size + f, f < size, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (2 * row + 1) * size + f, f < size, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + f, (silu * up).to(out_ptr.dtype.element_ty), f < size)
