"""LoRA (Hu et al., arXiv 2106.09685), named and initialized as in PEFT.

y = x Wᵀ + scale · (x Aᵀ) Bᵀ        A [R, I] random, B [O, R] zero: at first the model is its base
W + scale · B A                     the merged matrix, which is published
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tlt.base.config.lora import LoraSection
from tlt.base.types import UserError
from tlt.models.decoder import Linear, ModelConfig, Policy
from tlt.models.new import new_transformer


class LoraLinear(Linear):
    """Computes in its input's dtype, like mixed precision: the adapter is stored wider, and rounded for a
    product."""

    def __init__(self, base: nn.Linear, lora: LoraSection, dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device="meta", dtype=dtype)
        self.scale, self.is_on = lora.scale, True

    def forward(self, x_NI: Tensor) -> Tensor:
        y_NO = super().forward(x_NI)
        if not self.is_on:
            return y_NO
        a_RI, b_OR = self.lora_A.weight.to(x_NI.dtype), self.lora_B.weight.to(x_NI.dtype)
        return y_NO + self.scale * F.linear(F.linear(x_NI, a_RI), b_OR)

    @torch.no_grad()
    def merged(self, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """W + scale · B A, in the dtype of A and B. whole: gathers a sharded matrix."""
        weight_OI, a_RI, b_OR = whole(self.weight), whole(self.lora_A.weight), whole(self.lora_B.weight)
        return torch.addmm(weight_OI.to(a_RI.dtype), b_OR, a_RI, alpha=self.scale)


def add_adapters(model: Policy, lora: LoraSection, dtype: torch.dtype) -> None:
    """Freezes the model and adds adapters in place, on the meta device. UserError for a target that the model
    lacks, or a rank larger than a matrix."""
    within = {id(module) for layer in model.layers for module in layer.modules()}
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and id(layer) in within
    }
    known = dict.fromkeys(map(_kind, layers))
    if unknown := [target for target in lora.targets if target not in known]:
        raise UserError(
            f"lora.targets: the model has no matrix {unknown[0]!r} to adapt; give some of {', '.join(known)}"
        )
    targets = {name: layer for name, layer in layers.items() if _kind(name) in lora.targets}
    side, smallest = min((min(layer.weight.shape), _kind(name)) for name, layer in targets.items())
    if lora.rank > side:
        raise UserError(
            f"lora.rank: {lora.rank} is more than the smaller side of {smallest}, {side}; give at most {side}"
        )
    model.requires_grad_(False)
    for name, layer in targets.items():
        model.set_submodule(name, LoraLinear(layer, lora, dtype))


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


def is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def start_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """PEFT's default, float32 on the CPU. It depends on seed and name alone, so any rank can compute it."""
    start = torch.zeros(shape, device="cpu")
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
    return start


def adapter_shapes(config: ModelConfig, lora: LoraSection) -> dict[str, torch.Size]:
    """Allocates nothing; raises the errors of `add_adapters`."""
    with torch.device("meta"):
        model = new_transformer(config)
    add_adapters(model, lora, torch.float32)
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


@lru_cache
def count_adapters(config: ModelConfig, lora: LoraSection) -> int:
    return sum(shape.numel() for shape in adapter_shapes(config, lora).values())


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum (int64, modulo 2⁶⁴) of the numbers' bits as integers. The sums of a tensor's shards add up to its
    own."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.view(integers).sum(dtype=torch.int64)


class BaseOf:
    """The frozen base of an adapted model, for inference."""

    def __init__(self, model: Policy) -> None:
        self.model, self.config, self.logits = model, model.config, model.logits

    @property
    def head_weight(self) -> Tensor:
        return self.model.head_weight

    def __call__(self, *inputs: Any) -> Any:
        layers = adapted(self.model).values()
        try:
            for layer in layers:
                layer.is_on = False
            return self.model(*inputs)
        finally:
            for layer in layers:
                layer.is_on = True
