"""The learning rate as a function of the policy step. Knows no optimizer."""

from __future__ import annotations

import math

from tlt.config.schema import OptimizerSection


def learning_rate(config: OptimizerSection, step: int, num_steps: int) -> float:
    """Returns the rate of policy step `step`, counted from 0: linear warm-up, then constant, or linear or cosine to 0 at
    `num_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[config.schedule]
    return config.learning_rate * factor


def schedule_depends_on_num_steps(config: OptimizerSection) -> bool:
    """Returns whether another number of steps would give the steps already done other rates than they had. Such a run cannot be
    resumed with another run.num_steps: it would be neither the run that was begun nor the one asked for."""
    return config.schedule != "constant"
