"""The learning rate as a function of the policy step."""

from __future__ import annotations

import math

from tlt.base.config.schema import OptimizerSection


def learning_rate(config: OptimizerSection, step: int, num_steps: int) -> float:
    """`step` counts from 0: linear warm-up, then constant, or linear or cosine decay to 0 at `num_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[
        config.schedule
    ]
    return config.learning_rate * factor
