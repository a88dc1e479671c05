"""Adam's state by parameter name, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adam_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Before the first step the tensors are created as Adam creates them: zeros, sharded like the parameter;
    the step count on the CPU."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def trained_tensors(kind: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """KIND.NAME, KIND_optimizer.exp_avg.NAME, … No copies: filling them restores the training."""
    named = {f"{kind}.{name}": parameter for name, parameter in parameters.items()}
    for moment in MOMENTS:
        for name, parameter in parameters.items():
            named[f"{kind}_optimizer.{moment}.{name}"] = adam_state(optimizer, parameter)[moment]
    return named
