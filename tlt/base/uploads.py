"""Copies numbers to a device asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """An ordinary copy would wait for all earlier work of a GPU, and then the GPU for the host. PyTorch keeps
    the page-locked host memory until the copy is done."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
