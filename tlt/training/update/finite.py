"""Refuses non-finite updates on all ranks, before anything is published or saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tlt.base.config.schema import OptimizerSection
from tlt.base.types import Reward, UserError
from tlt.models.hf.weights import is_finite

LARGEST_REWARD = 1e150
"""The squares of larger rewards are infinite, and so is the standard deviation of their group."""
_LARGE_REWARD = 1e6
"""From here on, rewards are the likeliest cause of a non-finite update."""


class NonFiniteUpdate(UserError):
    """The update is pure: a restart would fail again."""


def check_rewards(rewards: Iterable[Reward], step: int) -> float:
    """Returns the largest absolute reward. Raises NonFiniteUpdate."""
    largest = max((abs(reward.value) for reward in rewards if reward.is_scored), default=0.0)
    if largest > LARGEST_REWARD:
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: no advantage can be computed; {_remedy(largest)}"
        )
    return largest


def check_loss(loss: float, grad_norm: float, step: int, largest_reward: float) -> None:
    """Raises NonFiniteUpdate, before the value spreads to the weights."""
    values = {"loss": loss, "gradient norm": grad_norm}
    if wrong := ", ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value)):
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: {wrong}; the weights did not take it: tlt train --resume "
            f"tries again; where it comes again, {_remedy(largest_reward)}"
        )


def check_weights(
    trained: Mapping[str, Tensor], step: int, chosen: OptimizerSection, sharded_over: dist.ProcessGroup | None
) -> None:
    """Raises NonFiniteUpdate. sharded_over: ranks that hold slices; None: every rank holds all weights."""
    parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained.values())
    is_finite_P = torch.stack([is_finite(part.detach()) for part in parts]).int()
    if sharded_over is not None:
        dist.all_reduce(is_finite_P, op=dist.ReduceOp.MIN, group=sharded_over)
    found = is_finite_P.tolist()
    if not all(found):
        names = ("learning_rate", "eps", "weight_decay")
        keys = ", ".join(f"optimizer.{name} {getattr(chosen, name):g}" for name in names)
        raise NonFiniteUpdate(
            f"policy update of step {step + 1}: the optimizer's step leaves weights that are not finite, "
            f"first {[*trained][found.index(0)]}; they are written nowhere; begin a run with more usual "
            f"values of {keys}"
        )


def _remedy(largest_reward: float) -> str:
    if largest_reward < _LARGE_REWARD:
        return "begin a run with a lower optimizer.learning_rate"
    return f"scale the rewards down, which reach {largest_reward:g}: in the task, or by rewards.weights"
