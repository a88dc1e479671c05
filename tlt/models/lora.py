"""LoRA (Hu et al., arXiv 2106.09685), named and initialized as in PEFT.

y = x Wᵀ + scale · (x Aᵀ) Bᵀ        A [R, I] random, B [O, R] zero: at first the model is its base
W + scale · B A                     the merged matrix, which is published

Experts keep their matrices in one tensor [E, O, I]; its adapter has a pair for each: A [E·R, I], B [O, R·E].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.base.config.lora import ALL_LINEAR, LoraSection
from tlt.base.types import UserError
from tlt.models.decoder import Linear, ModelConfig, Policy
from tlt.models.new import new_transformer
from tlt.models.routing import routers_of


class AdaptedLayer:
    weight: Tensor
    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float
    is_on: bool = True

    def sum(self, weight: Tensor, a: Tensor, b: Tensor, rows: slice = slice(None)) -> Tensor:
        """Returns rows of W + scale · B A. weight: these rows alone."""
        raise NotImplementedError

    @torch.no_grad()
    def merged(self, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """whole: gathers a sharded matrix."""
        weight, a, b = whole(self.weight), whole(self.lora_A.weight), whole(self.lora_B.weight)
        return self.sum(weight.to(a.dtype), a, b)


class LoraLinear(Linear, AdaptedLayer):
    """Computes in its input's dtype; the adapter may be stored wider."""

    def __init__(self, base: nn.Linear, lora: LoraSection, dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device="meta", dtype=dtype)
        self.scale = lora.scale

    def forward(self, x_NI: Tensor) -> Tensor:
        y_NO = super().forward(x_NI)
        if not self.is_on:
            return y_NO
        a_RI, b_OR = self.lora_A.weight.to(x_NI.dtype), self.lora_B.weight.to(x_NI.dtype)
        return y_NO + self.scale * F.linear(F.linear(x_NI, a_RI), b_OR)

    def sum(self, weight: Tensor, a: Tensor, b: Tensor, rows: slice = slice(None)) -> Tensor:
        return torch.addmm(weight, b[rows], a, alpha=self.scale)


class LoraExperts(nn.Module, AdaptedLayer):
    """The adapter of one tensor of all experts. Their module, transformers', computes with the sum, as in
    PEFT."""

    def __init__(self, experts: nn.Module, name: str, lora: LoraSection, dtype: torch.dtype) -> None:
        super().__init__()
        self._base, self.name = (experts,), name  # in a tuple, else the parent would be registered as a child
        num_experts, *sides = getattr(experts, name).shape
        self.is_transposed = getattr(experts, "is_transposed", True)  # Llama 4's do not say it
        num_out, num_in = reversed(sides) if self.is_transposed else sides
        self.lora_A = nn.Linear(num_in, lora.rank * num_experts, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(lora.rank * num_experts, num_out, bias=False, device="meta", dtype=dtype)
        self.rank, self.scale = lora.rank, lora.scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # the experts hold it
        weight: Tensor = getattr(self._base[0], self.name)
        return weight

    def sum(self, weight: Tensor, a: Tensor, b: Tensor, rows: slice = slice(None)) -> Tensor:
        a_ERI = a.view(-1, self.rank, a.shape[1])[rows].to(weight.dtype)
        b_EOR = b.view(len(b), self.rank, -1).permute(2, 0, 1)[rows].to(weight.dtype)
        if self.is_transposed:
            return torch.baddbmm(weight, a_ERI.mT, b_EOR.mT, alpha=self.scale)
        return torch.baddbmm(weight, b_EOR, a_ERI, alpha=self.scale)


def _with_adapters(experts: nn.Module) -> Callable[..., Any]:
    forward = experts.forward
    adapters = {layer.name: layer for layer in experts.children() if isinstance(layer, LoraExperts)}

    def adapted_forward(*args: Any, **kwargs: Any) -> Any:
        on = [layer for layer in adapters.values() if layer.is_on]
        sums = {layer.name: layer.sum(layer.weight, layer.lora_A.weight, layer.lora_B.weight) for layer in on}
        vars(experts).update(sums)  # which the module's attributes are looked up in before its parameters
        try:
            return forward(*args, **kwargs)
        finally:
            for name in sums:
                del vars(experts)[name]

    return adapted_forward


def add_adapters(model: Policy, lora: LoraSection, dtype: torch.dtype) -> None:
    """Freezes the model and adds adapters in place, on the meta device. Raises UserError for a target that
    the model lacks, or a rank larger than a matrix."""
    matrices = _matrices(model)
    targets = _targets_of(matrices, lora)
    chosen = {name: tensor for name, tensor in matrices.items() if target_of(name) in targets}
    side, smallest = min((min(tensor.shape[-2:]), target_of(name)) for name, tensor in chosen.items())
    if lora.rank > side:
        raise UserError(
            f"lora.rank: {lora.rank} is more than the smaller side of {smallest}, {side}; give at most {side}"
        )
    model.requires_grad_(False)
    for name in chosen:
        path, _, parameter = name.rpartition(".")
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, LoraLinear(layer, lora, dtype))
        else:
            layer.add_module(parameter + OF_EXPERTS, LoraExperts(layer, parameter, lora, dtype))
    for layer in model.modules():
        if any(isinstance(child, LoraExperts) for child in layer.children()):
            layer.forward = _with_adapters(layer)


OF_EXPERTS = "_lora"
"""model.layers.0.mlp.experts.down_proj ─▶ model.layers.0.mlp.experts.down_proj_lora.lora_A.weight"""


def _matrices(model: Policy) -> dict[str, Tensor]:
    """Leaves out routers, convolutions, and gates of one number."""
    routers = {id(module) for router in routers_of([*model.layers]) for module in router.modules()}
    within = {id(module) for layer in model.layers for module in layer.modules()} - routers
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if id(module) in within
        for name, parameter in module.named_parameters(recurse=False)
        if (isinstance(module, nn.Linear) and name == "weight" and min(parameter.shape) > 1)
        or (parameter.dim() == 3 and not isinstance(module, nn.Conv1d))
    }


def target_of(name: str) -> str:
    """q_proj of …self_attn.q_proj.weight, experts.down_proj of …mlp.experts.down_proj."""
    path = name.removesuffix(".weight")
    return ".".join(path.split(".")[-2:]) if path == name else path.rpartition(".")[2]


def _targets_of(matrices: Mapping[str, Tensor], lora: LoraSection) -> tuple[str, ...]:
    known = dict.fromkeys(map(target_of, matrices))
    if lora.targets == (ALL_LINEAR,):
        return tuple(known)
    if unknown := [target for target in lora.targets if target not in known]:
        raise UserError(
            f"lora.targets: the model has no matrix {unknown[0]!r} to adapt; give some of {', '.join(known)}"
        )
    return lora.targets


@lru_cache
def targets_of(config: ModelConfig, lora: LoraSection) -> tuple[str, ...]:
    """Spells all-linear out for the model."""
    with torch.device("meta"):
        return _targets_of(_matrices(new_transformer(config)), lora)


def targets_of_experts(config: ModelConfig) -> tuple[str, ...]:
    return tuple(target for target in targets_of(config, LoraSection(rank=1)) if "." in target)


def prefix_of(name: str) -> str:
    return name.removesuffix("weight") if name.endswith(".weight") else f"{name}{OF_EXPERTS}."


def adapted(model: nn.Module) -> dict[str, AdaptedLayer]:
    found: dict[str, AdaptedLayer] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            found[f"{name}.weight"] = layer
        elif isinstance(layer, LoraExperts):
            found[name.removesuffix(OF_EXPERTS)] = layer
    return found


def is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def start_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """PEFT's default, float32 on the CPU, a function of seed and name alone."""
    start = torch.zeros(shape, device="cpu")
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
    return start


def adapted_on_meta(config: ModelConfig, lora: LoraSection) -> Policy:
    """Allocates nothing; raises the errors of `add_adapters`."""
    with torch.device("meta"):
        model = new_transformer(config)
    add_adapters(model, lora, torch.float32)
    return model


def adapter_shapes(config: ModelConfig, lora: LoraSection) -> dict[str, torch.Size]:
    parameters = adapted_on_meta(config, lora).named_parameters()
    return {name: p.shape for name, p in parameters if p.requires_grad}


@lru_cache
def count_adapters(config: ModelConfig, lora: LoraSection) -> int:
    return sum(shape.numel() for shape in adapter_shapes(config, lora).values())


class BaseOf:
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
