"""CPU kernels for training: oneDNN's products and the flash kernel, where they are faster."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

KEPT_KERNELS = "128"
"""Capacity of oneDNN's and torch's kernel caches, read with their first kernel. With the default of 1,024, a
rank grows by 0.6 GiB within a hundred steps. Creating a kernel takes 0.3 ms."""
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT_KERNELS)
os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT_KERNELS)

MIN_ROWS = 256
"""Input rows from which oneDNN is faster although it reorders the weight for every product."""


def can_multiply(x_NI: Tensor) -> bool:
    is_fast = x_NI.dtype == torch.float32 and x_NI.device.type == "cpu" and len(x_NI) >= MIN_ROWS
    return is_fast and torch.backends.mkldnn.is_available()


class OneDnnProduct(torch.autograd.Function):
    """The weight's gradient is not faster by oneDNN, and stays with the BLAS (benchmarks/log.md)."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _onednn(x_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        (gradient_NO,) = gradients
        input_gradient = _onednn(gradient_NO, weight_OI.t().contiguous()) if ctx.needs_input_grad[0] else None
        weight_gradient = gradient_NO.t() @ x_NI if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient


def _onednn(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), packed, None, "none", [], "")
    return product


def can_fuse(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


class CausalAndOwn(torch.autograd.Function):
    """`causal_and_own` (attention.py) without T x T matrices: the flash kernel handles the first keys, and
    the own keys join by log-sum-exp. The kernel's backward gets output and log-sum-exp over all keys, so
    its probabilities and correction term (Dao, arXiv 2307.08691, §2.3) are those of the whole softmax."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD = tensors
        scale = q_HTD.shape[-1] ** -0.5
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        first_1HTD, lse_1HT = flash(q_HTD[None], k_HTD[None], v_HTD[None], 0.0, True, scale=scale)
        own_IHT = (q_HTD * own_k_IHTD).sum(-1) * scale
        whole_1HT = torch.cat([lse_1HT, own_IHT]).logsumexp(0, keepdim=True)
        own_IHT1 = (own_IHT - whole_1HT).exp()[..., None]
        out_HTD: Tensor = (lse_1HT - whole_1HT).exp()[0, ..., None] * first_1HTD[0]
        out_HTD = out_HTD + (own_IHT1 * own_v_IHTD).sum(0)
        ctx.save_for_backward(*tensors, out_HTD, whole_1HT, own_IHT1)
        return out_HTD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_HTD, k_HTD, v_HTD, own_k_IHTD, own_v_IHTD, out_HTD, whole_1HT, own_IHT1 = ctx.saved_tensors
        (d_HTD,) = gradients
        scale = q_HTD.shape[-1] ** -0.5
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        first = (q_HTD[None], k_HTD[None], v_HTD[None], out_HTD[None])
        dq_1HTD, dk_1HTD, dv_1HTD = flash(d_HTD[None], *first, whole_1HT, 0.0, True, scale=scale)
        correction_HT1 = (d_HTD * out_HTD).sum(-1, keepdim=True)
        d_scores_IHT1 = own_IHT1 * ((d_HTD * own_v_IHTD).sum(-1, keepdim=True) - correction_HT1) * scale
        dq_HTD = dq_1HTD[0] + (d_scores_IHT1 * own_k_IHTD).sum(0)
        return dq_HTD, dk_1HTD[0], dv_1HTD[0], d_scores_IHT1 * q_HTD, own_IHT1 * d_HTD
