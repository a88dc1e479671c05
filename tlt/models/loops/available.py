"""Loops compiled by Numba for CPUs, imported when first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from tlt.base.io.extras import loading_numba

if TYPE_CHECKING:
    from tlt.models.loops.layers import CompiledLayers, LayerWeights, Norm, Sizes
    from tlt.models.loops.products import Panels


class Loops(NamedTuple):
    attention: ModuleType
    blocks: ModuleType
    products: ModuleType
    layers: ModuleType
    experts: ModuleType


@cache
def load() -> Loops | None:
    if find_spec("numba") is None:
        return None
    with loading_numba():
        from tlt.models.loops import attention, blocks, experts, layers, products
    return Loops(attention, blocks, products, layers, experts)


def attention(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    if device.type != "cpu" or (loops := load()) is None:
        return None
    return loops.attention if dtype in loops.products.PRODUCT_DTYPES else None


def has_panels(dtype: torch.dtype, device: torch.device) -> bool:
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
    config: Sizes, layers: Sequence[LayerWeights], final_norm: Norm | None
) -> CompiledLayers | None:
    """None where they run one operation at a time."""
    loops = load()
    if loops is None or layers[0].down_linear.panels is None or not loops.layers.fills_panels(config):
        return None
    made: CompiledLayers = loops.layers.CompiledLayers(config, layers, final_norm)
    return made
