"""Repacks weights that vLLM packs for its CPU kernels and a reload leaves unchanged; checks the heads.

experts      are packed when their kernel is made; a reload keeps the kernel
tied heads   have no weights of their own to load, so they keep a packed copy of the old embedding
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)


def forget_experts(model: nn.Module) -> None:
    """The reload then makes new kernels, from the new weights."""
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_heads(model: nn.Module) -> None:
    for table in _tables(model):
        if isinstance(table, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(table, remove_weight=False)


def head_error(model: nn.Module) -> float:
    """Largest difference of a head's product from its unpacked weights', relative to the largest value. Some
    families use their embedding as head."""
    return max((_error(table) for table in _tables(model)), default=0.0)


def _tables(model: nn.Module) -> Iterator[Any]:
    layers: Iterator[Any] = model.modules()
    for layer in layers:
        is_table = isinstance(layer, VocabParallelEmbedding)
        if is_table and isinstance(layer.quant_method, UnquantizedEmbeddingMethod) and layer.weight.numel():
            yield layer


def _error(table: Any) -> float:
    weight_VE = table.weight
    hidden_1E = torch.linspace(-1, 1, weight_VE.shape[1], device=weight_VE.device).to(weight_VE.dtype)[None]
    wanted_V = torch.nn.functional.linear(hidden_1E, weight_VE)[0]
    found_V = table.quant_method.apply(table, hidden_1E)[0, : len(wanted_V)]
    return float((found_V - wanted_V).abs().max() / wanted_V.abs().max())
