"""Equal rows need compiled loops on a CPU (loops/), Triton's kernels on a GPU (equal.py)."""

from __future__ import annotations

import torch

from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.loops import available

GPU_DTYPES = (torch.float32, torch.bfloat16)
MOST_IN_GROUP = 32
"""Query heads of a key head on a GPU: one program attends for all of them (triton/attention.py)."""


def check_equal_rows(
    config: ModelConfig, dtype: torch.dtype, device: str, place: str = "run.equal_rows"
) -> None:
    """Raises UserError where a token's numbers may depend on others in its batch. device: cpu or cuda."""
    name = str(dtype).removeprefix("torch.")
    reason = _on_gpu(config, dtype, name) if device == "cuda" else _on_cpu(config, dtype, name)
    if reason is not None:
        raise UserError(f"{place}: {reason}")


def multiplied_by(dtype: torch.dtype) -> str:
    """What a CPU multiplies by: sums of one differ from another's in their last bits."""
    if dtype != torch.bfloat16 or (loops := available.load()) is None:
        return str(dtype).removeprefix("torch.")
    return f"bfloat16 by {loops.blocks.bfloat16_by()}"


def _on_cpu(config: ModelConfig, dtype: torch.dtype, name: str) -> str | None:
    if (loops := available.load()) is None:
        return (
            "without Numba PyTorch computes, whose products depend on the number of rows; pip install numba"
        )
    if not available.has_panels(dtype, torch.device("cpu")):
        return (
            f"dtype is {name}, where PyTorch's products depend on the number of rows; set float32 or bfloat16"
        )
    if config.architecture != "transformers" and not loops.layers.fills_panels(config):
        return "sizes that are no multiples of 16 are computed one operation at a time; leave it out"
    return None


def _on_gpu(config: ModelConfig, dtype: torch.dtype, name: str) -> str | None:
    if isinstance(config, AnyConfig):
        return (
            "on a GPU transformers' modules have no equal rows; give false, or a model that TLT's own "
            "decoder computes (docs/models.md)"
        )
    if dtype not in GPU_DTYPES:
        return f"not in {name} on a GPU; give dtype bfloat16 or float32, or false"
    if (group := config.num_heads // config.num_kv_heads) > MOST_IN_GROUP:
        return f"{group} query heads share a key head, and on a GPU {MOST_IN_GROUP} may; give false"
    return None
