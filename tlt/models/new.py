"""Makes a policy's module and an engine's copy."""

from __future__ import annotations

import torch

from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig, Policy, Transformer
from tlt.models.equal import EqualTransformer
from tlt.models.equal_rows import check_equal_rows
from tlt.models.packed import PackedTransformer
from tlt.models.target import Target

OF_HYBRIDS = "its linear attention or convolutions carry a state that no draft can be taken back from"


def new_transformer(
    config: ModelConfig, dtype: torch.dtype = torch.float32, checkpoints_activations: bool = False
) -> Policy:
    if isinstance(config, AnyConfig):
        from tlt.models.any import AnyTransformer

        return AnyTransformer(config, dtype, checkpoints_activations)
    return Transformer(config, checkpoints_activations).to(dtype)


def new_target(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    borrows: bool = False,
    equal_rows: bool = False,
) -> Target:
    """borrows: see `PackedTransformer`.
    equal_rows: see `EngineSettings`.

    Raises UserError for a hybrid, and where a GPU has no equal rows.
    """
    if config.is_hybrid:
        raise UserError(f"model: {OF_HYBRIDS}, so no drafter can read it; leave the drafter out")
    if equal_rows and torch.device(device).type == "cuda":
        check_equal_rows(config, dtype, "cuda")
        return EqualTransformer(config, dtype, device, borrows)
    if isinstance(config, AnyConfig):
        from tlt.models.any import AnyTarget

        return AnyTarget(config, dtype, device, borrows, equal_rows)
    return PackedTransformer(config, dtype, device, borrows)
