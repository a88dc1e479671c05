"""A causal language model of this process as an engine's policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig, Policy
from tlt.models.hf.config import parse_config


def unwrap(module: nn.Module) -> nn.Module:
    if isinstance(module, DistributedDataParallel):
        return unwrap(module.module)
    original = getattr(module, "_orig_mod", None)  # torch.compile's own name; it has no public one
    return unwrap(original) if isinstance(original, nn.Module) else module


def module_config(module: nn.Module) -> ModelConfig:
    """Raises UserError if our decoder would compute something else."""
    if isinstance(module, Policy):
        return module.config
    if not isinstance(module, PreTrainedModel):
        raise UserError(f"model: is a {type(module).__name__}; give a causal language model of transformers")
    described = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    return parse_config(described, f"model ({type(module).__name__}.config)")


def module_tensors(module: nn.Module, expected: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns the expected parameters without copies. Raises UserError for adapters, sharded and quantized
    models."""
    found = dict(module.named_parameters())
    for name, shape in expected.items():
        if name not in found:
            remedy = "give the plain model, adapters merged into it"
            raise UserError(f"model: parameter {name} of a {type(module).__name__} is missing; {remedy}")
        if isinstance(found[name], DTensor) or found[name].shape != shape:
            have = "a DTensor" if isinstance(found[name], DTensor) else str(list(found[name].shape))
            raise UserError(
                f"model: parameter {name} is {have} where the whole {list(shape)} is wanted; sharded and "
                "quantized models are not supported, so train with plain or data-parallel weights"
            )
    return {name: found[name] for name in expected}
