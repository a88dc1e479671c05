"""A causal language model that lives in this process: its shape and its tensors by name, for an engine beside
its trainer.

Knows transformers' modules and ours, which have the same names; no files, engines or trainers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tlt.hf.config import parse_config
from tlt.models.decoder import ModelConfig, Transformer
from tlt.types import UserError


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the model itself, out of what DistributedDataParallel and torch.compile put around it."""
    if isinstance(module, DistributedDataParallel):
        return unwrap(module.module)
    original = getattr(module, "_orig_mod", None)  # torch.compile's own name; it has no public one
    return unwrap(original) if isinstance(original, nn.Module) else module


def module_config(module: nn.Module) -> ModelConfig:
    """Returns the shape of a model. Raises UserError where this package would compute something else than
    the module does."""
    if isinstance(module, Transformer):
        return module.config
    if not isinstance(module, PreTrainedModel):
        raise UserError(f"model: is a {type(module).__name__}; give a causal language model of transformers")
    described = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    return parse_config(described, f"model ({type(module).__name__}.config)")


def module_tensors(module: nn.Module, expected: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns the module's parameters by their Hugging Face names: exactly the expected ones, where they lie
    (no copies).

    Raises UserError for adapters, sharded and quantized models, whose weights are not there to be read
    under their names.
    """
    found = dict(module.named_parameters())
    for name, shape in expected.items():
        if name not in found:
            remedy = "give the plain model, adapters merged into it"
            raise UserError(f"model: parameter {name} of a {type(module).__name__} is missing; {remedy}")
        if isinstance(found[name], DTensor) or found[name].shape != shape:
            have = "a DTensor" if isinstance(found[name], DTensor) else str(list(found[name].shape))
            remedy = (
                "sharded and quantized models are not supported, so train with plain or data-parallel weights"
            )
            raise UserError(
                f"model: parameter {name} is {have} where the whole {list(shape)} is wanted; {remedy}"
            )
    return {name: found[name] for name in expected}
