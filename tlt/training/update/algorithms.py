"""The algorithms as pure functions of tensors, one per choice of base/config/algorithm.py.

    rewards_R ─ group_advantages ──────┐
    returns   ─ whitened_advantages ───┴─▶ one per response token ─┐
    logprobs_T ─ importance_ratio ─────────────────────────────────┴─▶ policy_loss ────┐
                                                                       kl_estimate × β ┴▶ × loss_weight,
                                                                                          sum, / loss_divisor

Axes: R responses · G groups · T response tokens, of one response after the other · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.base.config.algorithm import Advantage, Aggregation, Algorithm, KLEstimator, RatioScope

STD_FLOOR = 1e-6
"""Bounds the advantage where rewards differ by rounding only."""


# ── advantages ──────────────────────────────────────────────────────────────────────────────────────────────


def group_advantages(rewards_R: Tensor, group_R: Tensor, advantage: Advantage = "group-std") -> Tensor:
    """advantages_R, float64, over the responses to one prompt:

    group-std      (r_i - mean(r)) / std(r), sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)
    group-mean     r_i - mean(r) (Dr. GRPO, arXiv 2503.20783, section 3.2)
    leave-one-out  r_i - mean of the others' r (RLOO, arXiv 2402.14740, section 2.3), n / (n - 1) × group-mean

    Exactly 0 where all rewards of a group are equal, and for a group of one.

    group_R: int64[R], numbers from 0; groups may differ in size.
    """
    num_groups = int(group_R.max()) + 1
    rewards_R = rewards_R.double()

    def per_group(values_R: Tensor, reduce: str) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).scatter_reduce(
            0, group_R, values_R, reduce, include_self=False
        )

    advantages_R = rewards_R - per_group(rewards_R, "mean")[group_R]
    size_G = torch.bincount(group_R, minlength=num_groups)
    others_G = (size_G - 1).clamp(min=1)
    if advantage == "group-std":
        std_G = (per_group(advantages_R.square(), "sum") / others_G).sqrt()
        advantages_R = advantages_R / (std_G[group_R] + STD_FLOOR)
    elif advantage == "leave-one-out":
        advantages_R = advantages_R * (size_G.double() / others_G)[group_R]
    # The mean of equal rewards can differ from them by rounding; their advantage is 0 all the same.
    is_equal_G = per_group(rewards_R, "amax") == per_group(rewards_R, "amin")
    return torch.where(is_equal_G[group_R], 0.0, advantages_R)


def whitened_advantages(returns: Sequence[Tensor]) -> list[Tensor]:
    """(return - mean) / std over all tokens of the step (REINFORCE++, arXiv 2501.03262, section 3); exactly 0
    where all returns are equal.

    returns: float64, for each response one per token.
    """
    all_T = torch.cat(list(returns))
    if bool((all_T == all_T[0]).all()):
        return [torch.zeros_like(returns_T) for returns_T in returns]
    mean, std = all_T.mean(), all_T.std(correction=0)
    return [(returns_T - mean) / (std + STD_FLOOR) for returns_T in returns]


def rewards_to_go(reward: float, penalties_T: Tensor) -> Tensor:
    """r - Σ_{s ≥ t} penalty_s for each token t (REINFORCE++, arXiv 2501.03262, section 3)."""
    return reward - penalties_T.flip(0).cumsum(0).flip(0)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """Rises from 0 to 1 over the last `buffer_tokens` before `max_tokens` (DAPO, arXiv 2503.14476, equation
    13, with the sign reversed)."""
    excess = num_tokens - (max_tokens - buffer_tokens)
    return min(max(excess / buffer_tokens, 0.0), 1.0) if buffer_tokens else 0.0


# ── the policy loss ─────────────────────────────────────────────────────────────────────────────────────────


class PolicyLoss(NamedTuple):
    loss_T: Tensor
    """Carries the gradient."""
    is_clipped_T: Tensor
    """Whether the clip changed the gradient."""


def policy_loss(
    ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, algorithm: Algorithm
) -> PolicyLoss:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "cispo":
        return cispo_loss(ratio_T, logprobs_T, advantages_T, low, high)
    return clipped_loss(ratio_T, advantages_T, low, high)


def importance_ratio(
    logprobs_T: Tensor, old_logprobs_T: Tensor, lengths: Sequence[int], level: RatioScope
) -> Tensor:
    """ρ = π / π_old for every token:

    token       of that token (PPO, arXiv 1707.06347, section 3)
    sequence    (Π_t ρ_t)^(1/n) over the n tokens of its response (GSPO, arXiv 2507.18071, equation 7)
    trajectory  Π_t ρ_t: the response is one action (RLOO, arXiv 2402.14740, section 2.3)
    """
    log_ratio_T = logprobs_T - old_logprobs_T
    if level == "token":
        return log_ratio_T.exp()
    parts = log_ratio_T.split(list(lengths))
    of_responses = [part.mean() if level == "sequence" else part.sum() for part in parts]
    return torch.cat([one.expand_as(part) for one, part in zip(of_responses, parts, strict=True)]).exp()


def clipped_loss(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> PolicyLoss:
    """-min(ρ A, clip(ρ, low, high) A) (PPO, arXiv 1707.06347, equation 7; DAPO, arXiv 2503.14476, equation 8,
    with two bounds)."""
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(low, high) * advantages_T
    return PolicyLoss(-torch.minimum(unclipped_T, clipped_T), clipped_T < unclipped_T)


def cispo_loss(
    ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, low: float, high: float
) -> PolicyLoss:
    """-clip(ρ, low, high) A log π, with the clipped ratio as a constant: no token loses its gradient
    (MiniMax-M1, arXiv 2506.13585, equations 4 and 5)."""
    weight_T = ratio_T.detach().clamp(low, high)
    return PolicyLoss(-weight_T * advantages_T * logprobs_T, (weight_T != ratio_T) & (advantages_T != 0))


def importance_weights(old_logprobs_T: Tensor, engine_logprobs_T: Tensor, *, cap: float) -> Tensor:
    """min(π_trainer / π_engine, cap), a constant of the loss: corrects for the engine's different arithmetic
    (truncated importance sampling, Ionides 2008; for RL engines Yao et al. 2025)."""
    return (old_logprobs_T - engine_logprobs_T).exp().clamp(max=cap).detach()


# ── estimators ──────────────────────────────────────────────────────────────────────────────────────────────


def kl_estimate(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """With r = π_reference / π: k1 = -log r, k2 = (log r)² / 2, k3 = r - log r - 1 (Schulman 2020,
    "Approximating KL divergence"). Under tokens of π, k1 and k3 are unbiased for KL(π ‖ π_reference), and k2
    has its gradient; k3 is never negative (GRPO, arXiv 2402.03300, equation 4)."""
    log_ratio_T = reference_logprobs_T - logprobs_T
    match estimator:
        case "k1":
            return -log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
    return log_ratio_T.expm1() - log_ratio_T


def entropy(logprobs_TV: Tensor) -> Tensor:
    """H_T = -Σ_v p log p in nats. Row by row on a CPU: it stays in the cache and is six times as fast."""
    if logprobs_TV.device.type != "cpu" or not len(logprobs_TV):
        entropy_TV: Tensor = torch.special.entr(logprobs_TV.exp())
        return entropy_TV.sum(-1)
    least = torch.finfo(logprobs_TV.dtype).min
    return torch.stack([-(row_V.exp() @ row_V.clamp(min=least)) for row_V in logprobs_TV])


# ── one loss of many tokens ─────────────────────────────────────────────────────────────────────────────────


def loss_weight(num_tokens: int, aggregation: Aggregation) -> float:
    return 1 / num_tokens if aggregation == "sequence" else 1.0


def loss_divisor(lengths: Sequence[int], aggregation: Aggregation, max_tokens: int) -> int:
    """Over all micro-batches and ranks of an optimizer step.

        token      the tokens (DAPO, arXiv 2503.14476, equation 12)
        sequence   the responses (GRPO, arXiv 2402.03300, equation 3)
        constant   the responses × `max_tokens` (Dr. GRPO, arXiv 2503.20783, section 3.2)

    lengths: of all responses; 0 for a masked one.
    """
    match aggregation:
        case "token":
            return max(sum(lengths), 1)
        case "sequence":
            return len(lengths)
    return len(lengths) * max_tokens
