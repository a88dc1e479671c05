"""Compiled loops for CPUs, where Numba is installed: imported when first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from tlt.base.io.extras import loading_numba
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig

if TYPE_CHECKING:
    from tlt.models.compiled_layers import CompiledLayers, LayerWeights, Norm
    from tlt.models.compiled_products import Panels


class Loops(NamedTuple):
    attention: ModuleType
    products: ModuleType
    layers: ModuleType


@cache
def load() -> Loops | None:
    if find_spec("numba") is None:
        return None
    with loading_numba():
        from tlt.models import compiled_attention, compiled_layers, compiled_products
    return Loops(compiled_attention, compiled_products, compiled_layers)


def attention(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """compiled_attention.py; None: PyTorch attends."""
    if device.type != "cpu" or (loops := load()) is None:
        return None
    return loops.attention if dtype in loops.products.PRODUCT_DTYPES else None


def has_panels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether frozen matrices are multiplied by compiled loops."""
    if device.type != "cpu" or (loops := load()) is None:
        return False
    return dtype in loops.products.PRODUCT_DTYPES


def panels(num_in: int, num_out: int, dtype: torch.dtype, device: torch.device) -> Panels | None:
    loops = load()
    if loops is None or not has_panels(dtype, device):
        return None
    made: Panels = loops.products.Panels(num_in, num_out, dtype)
    return made


def compile_layers(
    config: ModelConfig, layers: Sequence[LayerWeights], final_norm: Norm | None
) -> CompiledLayers | None:
    """None where they run one operation at a time."""
    loops = load()
    if loops is None or layers[0].down_linear.panels is None or not loops.layers.fills_panels(config):
        return None
    made: CompiledLayers = loops.layers.CompiledLayers(config, layers, final_norm)
    return made


def check_equal_rows(config: ModelConfig, dtype: torch.dtype) -> None:
    """Of a CPU. Raises UserError where a token's numbers may depend on others in its batch."""
    if (loops := load()) is None:
        problem = "without Numba PyTorch computes, whose products depend on the number of rows"
        remedy = "pip install numba"
    elif not has_panels(dtype, torch.device("cpu")):
        name = str(dtype).removeprefix("torch.")
        problem = f"run.dtype is {name}, in which PyTorch's products depend on the number of rows"
        remedy = "set float32 or bfloat16"
    elif config.architecture == "transformers" or not loops.layers.fills_panels(config):
        problem = "the model is computed by transformers' modules, or one operation at a time"
        remedy = "leave it out (docs/models.md lists what our own decoder computes)"
    else:
        return
    raise UserError(f"run.equal_rows: {problem}; {remedy}")
