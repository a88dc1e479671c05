"""Builds drafters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tlt.drafter.block import BlockModel, PackedBlock
from tlt.drafter.eagle import EagleModel, PackedEagle
from tlt.drafter.model import DraftModel, PackedDrafter, find_mismatch
from tlt.drafter.shape import BlockShape, DrafterShape, EagleShape


def new_model(shape: DrafterShape) -> DraftModel:
    if isinstance(shape, BlockShape):
        return BlockModel(shape)
    assert isinstance(shape, EagleShape), shape
    return EagleModel(shape)


def new_packed(shape: DrafterShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> PackedDrafter:
    if isinstance(shape, BlockShape):
        return PackedBlock(shape, dtype, device)
    assert isinstance(shape, EagleShape), shape
    return PackedEagle(shape, dtype, device)


def pack_drafter(
    shape: DrafterShape, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PackedDrafter:
    packed = new_packed(shape, dtype, device)
    packed.load(tensors, version=0)
    return packed


def find_misfit(shape: DrafterShape, tensors: Mapping[str, Tensor]) -> str | None:
    with torch.device("meta"):
        model = new_model(shape)
    return find_mismatch(model, tensors)
