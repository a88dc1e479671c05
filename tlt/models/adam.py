"""Adam's state by the names of its parameters: what a checkpoint keeps of an optimizer. Knows no files and
no ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adam_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns both moments and the number of steps of a parameter, the optimizer's own tensors. Before its
    first step they are made here as it would make them: zeros, sharded as the parameter is, and the number
    of steps on the CPU."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def trained_tensors(kind: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what training changes, by name: KIND.NAME, KIND_optimizer.exp_avg.NAME and so on. They are the
    tensors
    themselves: to fill them restores the training."""
    named = {f"{kind}.{name}": parameter for name, parameter in parameters.items()}
    for moment in MOMENTS:
        for name, parameter in parameters.items():
            named[f"{kind}_optimizer.{moment}.{name}"] = adam_state(optimizer, parameter)[moment]
    return named
