"""Log-probabilities by the update's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tlt.base.types import Rollout
from tlt.engine.build.model import Model
from tlt.engine.equal_rows import EqualRows
from tlt.models.new import new_transformer
from tlt.training.build.policy import build_policy
from tlt.training.update.logprobs import response_logprobs
from tlt.training.update.micro_batches import Experience

_PACKED = 8
"""Responses in a forward."""


@torch.no_grad()
def trained_logprobs(
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    rollouts: Sequence[Rollout],
    temperature: float,
    rows: EqualRows | None = None,
) -> list[Rollout]:
    """Returns the rollouts with log-probabilities of the update's forward pass, several packed into one, or
    of `rows`. The policy is in the engine's dtype: what is compared is the arithmetic, not the weights'
    rounding."""
    with torch.device("meta"):
        policy = new_transformer(model.config, dtype)
    policy = build_policy(policy, model, device)
    found: list[Rollout] = []
    for start in range(0, len(rollouts), _PACKED):
        packed = rollouts[start : start + _PACKED]
        batch = [Experience(rollout, (), needs_grad=False) for rollout in packed]
        logprobs_T, _ = response_logprobs(policy, batch, temperature or 1.0, rows=rows)
        parts = logprobs_T.cpu().split([len(rollout.token_ids) for rollout in packed])
        found += [
            replace(one, logprobs=tuple(part.tolist())) for one, part in zip(packed, parts, strict=True)
        ]
    return found
