"""Products of rows with their experts' matrices: the sums of products.py.

x [S, I], sorted by expert      ends [X]: after each expert's rows      ─▶ [S, O]
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # carray is public and not listed
from torch import Tensor

from tlt.base import loops
from tlt.base.loops import as_pointer, int64_at
from tlt.models.loops.blocks import LANES, multiply_panels
from tlt.models.loops.products import Panels, items_for, threads_for

_FIELDS = ("x", "weights", "multiply", "out", "ends", "num_steps", "num_panels", "num_parts")
_CALL = np.dtype([*loops.HEAD, *((name, "i8") for name in _FIELDS)])


class ExpertPanels:
    """Matrices of one shape, each as `Panels`, one behind the other."""

    def __init__(self, num_experts: int, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        self.experts = [Panels(num_in, num_out, dtype) for _ in range(num_experts)]
        self.weights = torch.stack([panels.weights for panels in self.experts])
        for panels, weights in zip(self.experts, self.weights, strict=True):
            panels.weights = weights
        self.function = loops.compiled(_multiply)

    def load(self, weight_XOI: Tensor) -> None:
        for panels, weight_OI in zip(self.experts, weight_XOI, strict=True):
            panels.load(weight_OI)

    def multiply(self, x_SI: Tensor, ends_X: Tensor) -> Tensor:
        """ends_X: int64."""
        one, dtype = self.experts[0], self.weights.dtype
        x_SI = one.as_words(x_SI)
        out_SO = torch.empty(len(x_SI), one.num_panels * LANES)
        num_threads = threads_for(x_SI.numel() * out_SO.shape[1])
        num_parts = min(items_for(num_threads), one.num_panels)
        at = x_SI.data_ptr(), self.weights.data_ptr(), one.multiply_at, out_SO.data_ptr(), ends_X.data_ptr()
        sizes = self.weights.shape[2], one.num_panels, num_parts
        call = np.array([(0, num_parts * len(self.experts), *at, *sizes)], _CALL)
        loops.Loop(self.function, call, num_threads).run()
        return out_SO[:, : one.num_out].to(dtype)


def _multiply(at):  # type: ignore
    call = carray(as_pointer(at), 1, _CALL)[0]
    ends, row_bytes = int64_at(call.ends), 4 * call.num_steps
    stride = call.num_panels * LANES
    while True:
        item = loops.take_item(at)
        if item >= call.num_items:
            return
        expert, part = item // call.num_parts, item % call.num_parts
        row = ends[expert - 1] if expert else np.int64(0)
        num_rows = ends[expert] - row
        if num_rows == 0:
            continue
        first = call.num_panels * part // call.num_parts
        end = call.num_panels * (part + 1) // call.num_parts
        x = call.x + row * row_bytes, call.num_steps
        weights = call.weights + expert * row_bytes * stride, call.multiply
        out = call.out + 4 * row * stride, stride
        multiply_panels(x, num_rows, call.num_steps, weights, first, end, out, 0)
