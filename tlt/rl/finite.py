"""Refuses updates that are not finite: rewards of which no advantage can be made, a loss, a gradient,
weights. Each refusal is one line with the step and the likeliest cause, on all ranks, before anything of
the update is published or saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tlt.config.schema import OptimizerSection
from tlt.hf.weights import is_finite
from tlt.types import Reward, UserError

LARGEST_REWARD = 1e150
"""The squares of larger ones are infinite, and with them the standard deviation of a group."""
_LARGE_REWARD = 1e6
"""From here on rewards are the likeliest cause of an update that is not finite."""


class NonFiniteUpdate(UserError):
    """Something in an update was not finite. As the update is a pure function it would come again, so no
    restart follows."""


def check_rewards(rewards: Iterable[Reward], step: int) -> float:
    """Returns the largest absolute reward; NonFiniteUpdate where it is too large for an advantage."""
    largest = max((abs(reward.value) for reward in rewards if reward.is_scored), default=0.0)
    if largest > LARGEST_REWARD:
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: no advantage can be computed; {_remedy(largest)}"
        )
    return largest


def check_loss(loss: float, grad_norm: float, step: int, largest_reward: float) -> None:
    """Raises NonFiniteUpdate before the optimizer could spread what is wrong to the weights."""
    values = {"loss": loss, "gradient norm": grad_norm}
    if wrong := ", ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value)):
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: {wrong}; the weights did not take it: tlt train --resume "
            "tries again; where it"
            f" comes again, {_remedy(largest_reward)}"
        )


def check_weights(
    trained: Mapping[str, Tensor], step: int, chosen: OptimizerSection, sharded_over: dist.ProcessGroup | None
) -> None:
    """Raises NonFiniteUpdate where the optimizer's step has left a weight that is not finite. It reads the
    weights once, where the step reads and writes them, gradients and both moments.

    sharded_over: the ranks that hold slices; None: each holds the same weights, and finds the same.
    """
    parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained.values())
    is_finite_P = torch.stack([is_finite(part.detach()) for part in parts]).int()
    if sharded_over is not None:
        dist.all_reduce(is_finite_P, op=dist.ReduceOp.MIN, group=sharded_over)
    found = is_finite_P.tolist()
    if not all(found):
        keys = ", ".join(
            f"optimizer.{key} {getattr(chosen, key):g}" for key in ("learning_rate", "eps", "weight_decay")
        )
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: the optimizer's step leaves weights that are not finite, "
            "first"
            f" {[*trained][found.index(0)]}; they are written nowhere; begin a run with more usual values "
            f"of {keys}"
        )


def _remedy(largest_reward: float) -> str:
    if largest_reward < _LARGE_REWARD:
        return "begin a run with a lower optimizer.learning_rate"
    return f"scale the rewards down, which reach {largest_reward:g}: in the task, or by rewards.weights"
