"""GRPO as pure functions of tensors: advantages, losses, estimators. Knows no model, no batch layout and no process group.

    rewards_R ─ group_advantages ─▶ advantages_R ─▶ one per response token ─▶ clipped_policy_loss ┐
                                                                              kl_estimate × β ────┴▶ token_mean

Axes: R responses · N response tokens, of all responses · V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STD_FLOOR = 1e-6
"""Added to a group's standard deviation: it bounds the advantage where rewards differ by rounding only."""


class Advantages(NamedTuple):
    """advantages_R: float64.  num_zero_variance: groups whose advantages are exactly 0: their rewards are equal, or fewer than
    two responses were scored."""

    advantages_R: Tensor
    num_zero_variance: int


def group_advantages(
    rewards_R: Tensor, group_R: Tensor, *, normalize_by_std: bool, is_scored_R: Tensor | None = None
) -> Advantages:
    """Returns A_i = (r_i - mean(r)) / std(r) over the responses to one prompt (GRPO, arXiv 2402.03300, section 4.1.2), with the
    sample standard deviation; without `normalize_by_std`, A_i = r_i - mean(r) (Dr. GRPO, arXiv 2503.20783, equation 3).

    rewards_R: any float dtype; computed in float64.   group_R: int64[R], numbers from 0; groups may differ in size.
    is_scored_R: bool[R]; a response without a score counts in no mean and has advantage 0. None: all have one.
    """
    num_groups = int(group_R.max()) + 1
    all_R = torch.zeros(len(rewards_R), dtype=torch.float64)
    is_scored_R = torch.ones(len(rewards_R), dtype=torch.bool) if is_scored_R is None else is_scored_R
    rewards_R, group_R = rewards_R[is_scored_R].double(), group_R[is_scored_R]

    def per_group(values_R: Tensor, reduce: str) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).scatter_reduce(0, group_R, values_R, reduce, include_self=False)

    centred_R = rewards_R - per_group(rewards_R, "mean")[group_R]
    is_flat_G = per_group(rewards_R, "amax") == per_group(rewards_R, "amin")
    advantages_R = centred_R
    if normalize_by_std:
        size_G = torch.bincount(group_R, minlength=num_groups)
        std_G = (per_group(centred_R.square(), "sum") / (size_G - 1).clamp(min=1)).sqrt()
        advantages_R = centred_R / (std_G[group_R] + STD_FLOOR)
    # The mean of equal rewards can differ from them by rounding; their advantage is 0 all the same.
    all_R[is_scored_R] = torch.where(is_flat_G[group_R], 0.0, advantages_R)
    return Advantages(all_R, int(is_flat_G.sum()))


class PolicyLoss(NamedTuple):
    """loss_N carries the gradient; is_clipped_N says where the clip removed it."""

    loss_N: Tensor
    is_clipped_N: Tensor


def clipped_policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Returns -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) with ρ = exp(logprob - old logprob), token by token
    (PPO, arXiv 1707.06347, equation 7; the asymmetric clip of DAPO, arXiv 2503.14476, equation 8)."""
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    unclipped_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return PolicyLoss(-torch.minimum(unclipped_N, clipped_N), clipped_N < unclipped_N)


def importance_weights(old_logprobs_N: Tensor, engine_logprobs_N: Tensor, *, cap: float) -> Tensor:
    """Returns min(π_trainer / π_engine, cap) per token, a constant of the loss. It corrects for an engine whose arithmetic
    samples a slightly different policy (truncated importance sampling, Ionides 2008, as Yao et al. 2025 apply it to
    RL engines)."""
    return (old_logprobs_N - engine_logprobs_N).exp().clamp(max=cap).detach()


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Returns k3 = r - log r - 1 with r = π_reference / π. It is unbiased for KL(π ‖ π_reference) under tokens of π, and never
    negative (Schulman 2020, "Approximating KL divergence"; GRPO, arXiv 2402.03300, equation 4)."""
    log_ratio_N = reference_logprobs_N - logprobs_N
    return log_ratio_N.expm1() - log_ratio_N


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Returns H_N = -Σ_v p log p in nats, of log-probabilities; a token of probability 0 adds nothing."""
    entropy_NV: Tensor = torch.special.entr(logprobs_NV.exp())
    return entropy_NV.sum(-1)


def token_mean(values_N: Tensor, num_tokens: int) -> Tensor:
    """Returns Σ values / num_tokens. `num_tokens` counts the response tokens of *all* micro-batches and ranks: every token
    weighs the same, whatever response, micro-batch or rank it lies in (DAPO, arXiv 2503.14476, section 3.3). Parts add up."""
    return values_N.sum() / num_tokens
