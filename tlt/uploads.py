"""Numbers of the host on their way to a device. The host does not wait for a GPU: an ordinary copy would
first let everything finish that the GPU was given before, and then the GPU would wait for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the values as a tensor on the device. For a GPU they lie in page-locked memory until they
    are sent; PyTorch looks after that."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
