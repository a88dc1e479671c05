"""Products of rows with a matrix, in compiled loops for CPUs.

    W [O, I] ─▶ panels [O / 16, I, 16]
    a block of rows × panels stays in registers: for each input i, sums[row, panel] += x[row, i] · W[panel, i]

An output is the sum of its products in the order of the inputs, in float32, each added by one rounding (fma),
by however many threads: its bits depend on its own row alone. In bfloat16, inputs and weights go in pairs,
which some processors add by one instruction, some even 16 pairs (tiles.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public and not listed
from numba.extending import overload
from torch import Tensor

from tlt.base import loops
from tlt.base.loops import as_pointer
from tlt.models.loops.blocks import LANES, compiled_multiply, multiply_panels
from tlt.models.loops.numbers import round_to_bfloat16

PRODUCT_DTYPES = (torch.float32, torch.bfloat16)

PRODUCTS_PER_THREAD = 250_000
"""Multiplications that justify another thread, which takes some microseconds to wake."""


class Panels:
    """A frozen matrix. Loading other weights keeps its memory.

    weights: [panels, I, 16], in bfloat16 [panels, I / 2, 16, 2]; beyond O and I zeros.
    """

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        self.num_in, self.num_out = num_in, num_out
        self.num_panels = -(-num_out // LANES)
        self.in_pairs = 2 if dtype == torch.bfloat16 else 1
        shape = (self.num_panels, -(-num_in // self.in_pairs), LANES, self.in_pairs)
        self.weights = torch.zeros(shape, dtype=dtype)
        self.address = self.weights.data_ptr()
        self.function, self.multiply_at = loops.compiled(_product), compiled_multiply(dtype)

    def load(self, weight_OI: Tensor) -> None:
        num_panels, num_steps, *_ = self.weights.shape
        rest = num_steps * self.in_pairs - self.num_in, num_panels * LANES - self.num_out
        padded_OI = F.pad(weight_OI, (0, rest[0], 0, rest[1])) if any(rest) else weight_OI
        self.weights.copy_(padded_OI.reshape(num_panels, LANES, num_steps, -1).transpose(1, 2))

    def multiply(self, x_NI: Tensor, base_NO: Tensor | None = None) -> Tensor:
        """base + x Wᵀ, in the matrix's dtype. base_NO: of N rows or one; None: zeros."""
        num_rows, width, x_NI = len(x_NI), self.num_panels * LANES, self.as_words(x_NI)
        out_NO = torch.empty(num_rows, width)
        if base_NO is not None:
            out_NO[:, : self.num_out] = base_NO
        addresses = (x_NI.data_ptr(), self.address, self.multiply_at, out_NO.data_ptr())
        num_threads = threads_for(x_NI.numel() * width)
        num_items = min(items_for(num_threads), self.num_panels)
        sizes = (num_rows, self.weights.shape[1], self.num_panels, int(base_NO is not None))
        call = np.array([(0, num_items, *addresses, *sizes)], _CALL)
        loops.Loop(self.function, call, num_threads).run()
        return out_NO[:, : self.num_out].to(self.weights.dtype)

    def as_words(self, x_NI: Tensor) -> Tensor:
        is_odd = self.num_in < self.weights.shape[1] * self.in_pairs
        return (F.pad(x_NI, (0, 1)) if is_odd else x_NI).to(self.weights.dtype).contiguous()


def threads_for(num_products: int) -> int:
    return min(torch.get_num_threads(), 1 + num_products // PRODUCTS_PER_THREAD)


def items_for(num_threads: int) -> int:
    """A late thread leaves items to the others."""
    return 1 if num_threads == 1 else 2 * num_threads


_CALL = np.dtype(
    [
        *loops.HEAD,
        *(
            (name, "i8")
            for name in ("x", "weights", "multiply", "out", "num_rows", "num_steps", "num_panels", "adds")
        ),
    ]
)


def _product(at):  # type: ignore
    call = carray(as_pointer(at), 1, _CALL)[0]
    while True:
        item = loops.take_item(at)
        if item >= call.num_items:
            return
        first = call.num_panels * item // call.num_items
        end = call.num_panels * (item + 1) // call.num_items
        out, stride = call.out, call.num_panels * LANES
        x = call.x, call.num_steps
        weights = call.weights, call.multiply
        multiply_panels(x, call.num_rows, call.num_steps, weights, first, end, (out, stride), call.adds)


@njit(nogil=True, cache=True)
def multiply_float32(x, num_rows, num_in, weights, first, end, out, adds):  # type: ignore
    """Rounds float32 inputs to the weights' type.

    weights: (address, address of the function that multiplies by them, an array of such numbers).
    """
    at, multiply, like = weights
    words = _words(x[0], x[1], num_rows, num_in, like)
    if words.size:
        num_in = (num_in + 1) // 2
        x = np.int64(words.ctypes.data), num_in
    multiply_panels(x, num_rows, num_in, (at, multiply), first, end, out, adds)
    return words.size  # they live until here


def _words(x: Any, stride: Any, num_rows: Any, num_in: Any, like: Any) -> Any:
    """Rows of float32 numbers as words of the weights' type; empty: they are already."""


@overload(_words)
def _(x, stride, num_rows, num_in, like):  # type: ignore
    if isinstance(like.dtype, types.Float):
        return lambda x, stride, num_rows, num_in, like: np.empty(0, np.uint32)
    return lambda x, stride, num_rows, num_in, like: _pairs(x, stride, num_rows, num_in)


@njit(nogil=True, cache=True)
def _pairs(x, stride, num_rows, num_in):  # type: ignore
    """Rows of x rounded to bfloat16, as [N, I / 2] words: of each pair, the second is in the upper half."""
    half, x = (num_in + 1) // 2, loops.float32_at(x)
    pairs = np.empty(num_rows * half, np.uint32)
    for row in range(np.uint64(num_rows)):
        at, to = row * np.uint64(stride), row * np.uint64(half)
        for i in range(np.uint64(num_in // 2)):
            first, second = at + np.uint64(2) * i, at + np.uint64(2) * i + np.uint64(1)
            pairs[to + i] = round_to_bfloat16(x[first]) | np.uint32(
                round_to_bfloat16(x[second])
            ) << np.uint32(16)
        if num_in % 2:
            pairs[to + np.uint64(half - 1)] = round_to_bfloat16(x[at + np.uint64(num_in - 1)])
    return pairs
