"""Log-probabilities of chosen tokens on a GPU: one program a row, whose sums have one order whatever the
number of rows (see models/triton/rows.py).

    log p(chosen) = scaled logit - (largest + log Σ exp(scaled logit - largest)),  scaled = logit / T
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
POINTERS = ("logits_ptr", "chosen_ptr", "inverse_ptr", "out_ptr")


def chosen_logprobs(logits_RV: Tensor, chosen_R: Tensor, inverse_R: Tensor | None = None) -> Tensor:
    """float32[R], of float64 logits float64; NaN where the logits are no distribution.
    inverse_R: float64, 1 / T; None: 1."""
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    out_R = torch.empty(num_rows, dtype=dtype, device=logits_RV.device)
    if num_rows == 0:
        return out_R
    with torch.cuda.device_of(logits_RV):
        chosen_logprobs_kernel[num_rows,](
            logits_RV,
            chosen_R,
            inverse_R,
            out_R,
            logits_RV.stride(0),
            SIZE=vocab_size,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return out_R


@triton.jit(do_not_specialize=("stride",), do_not_specialize_on_alignment=POINTERS)
def chosen_logprobs_kernel(
    logits_ptr, chosen_ptr, inverse_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.full((), 1.0, dtype)
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + row).to(dtype)
    row_ptr = logits_ptr + row * stride
    largest_of = tl.full((BLOCK,), -float("inf"), dtype)
    for first in range(0, SIZE, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + token, token < SIZE, -float("inf")).to(dtype) * inverse
        largest_of = tl.maximum(largest_of, logit)
    largest = tl.max(largest_of, 0)
    sum_of = tl.zeros((BLOCK,), dtype)
    for first in range(0, SIZE, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + token, token < SIZE, -float("inf")).to(dtype) * inverse
        sum_of += tl.exp(logit - largest)
    chosen = tl.load(row_ptr + tl.load(chosen_ptr + row)).to(dtype) * inverse
    tl.store(out_ptr + row, chosen - (largest + tl.log(tl.sum(sum_of, 0))))
