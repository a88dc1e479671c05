"""Advantages, losses and estimators against numbers worked out by hand, plain loops, enumeration and finite differences."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.rl.algorithms import (
    STD_FLOOR,
    clipped_policy_loss,
    entropy,
    group_advantages,
    importance_weights,
    kl_estimate,
    token_mean,
)

double = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=double)


# ── advantages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_advantages_of_one_solved_in_four_are_those_worked_out_by_hand() -> None:
    result = group_advantages(tensor(1, 0, 0, 0), torch.zeros(4, dtype=torch.long), normalize_by_std=True)
    assert result.advantages_R.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # std = 1/2
    result = group_advantages(tensor(1, 0, 0, 0), torch.zeros(4, dtype=torch.long), normalize_by_std=False)
    assert result.advantages_R.tolist() == [0.75, -0.25, -0.25, -0.25]


@given(
    st.lists(st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=5), min_size=1, max_size=5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_advantages_agree_with_a_plain_loop_over_interleaved_groups(groups, by_std, random) -> None:
    pairs = [(group, value) for group, values in enumerate(groups) for value in values]
    random.shuffle(pairs)
    result = group_advantages(tensor(*(v for _, v in pairs)), torch.tensor([g for g, _ in pairs]), normalize_by_std=by_std)
    num_flat = 0
    expected = {}
    for group, values in enumerate(groups):
        is_flat = len(set(values)) == 1
        num_flat += is_flat
        scale = statistics.stdev(values) + STD_FLOOR if by_std and len(values) > 1 else 1.0
        for value in values:
            expected[group, value] = 0.0 if is_flat else (value - statistics.fmean(values)) / scale
    assert result.num_zero_variance == num_flat
    for pair, advantage in zip(pairs, result.advantages_R.tolist(), strict=True):
        assert advantage == pytest.approx(expected[pair], rel=1e-6, abs=1e-8)


def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_rounded() -> None:
    rewards = tensor(0.1, 0.1, 0.1)
    assert rewards.sum() / 3 != 0.1  # so that subtracting the mean would not do
    result = group_advantages(rewards, torch.zeros(3, dtype=torch.long), normalize_by_std=True)
    assert result.advantages_R.tolist() == [0, 0, 0]
    assert result.num_zero_variance == 1


def test_a_response_that_was_not_scored_is_left_out_of_its_group_and_gets_no_advantage() -> None:
    group_R = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0])
    is_scored_R = torch.tensor([True, True, False, True, False, False, False, True])
    result = group_advantages(tensor(1, 0, 9, 1, 9, 9, 9, 0), group_R, normalize_by_std=False, is_scored_R=is_scored_R)
    assert result.advantages_R.tolist() == pytest.approx([2 / 3, -1 / 3, 0, 0, 0, 0, 0, -1 / 3])
    assert result.advantages_R[[2, 3, 4, 5, 6]].tolist() == [0] * 5
    assert result.num_zero_variance == 2, "with fewer than two scores there is nothing to compare"


# ── the policy loss ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),  # below 1 + 0.3
        (1.5, 2.0, -2.6, True),  # 1.3 × 2
        (0.5, 2.0, -1.0, False),  # going down with a positive advantage stays free to return
        (0.5, -2.0, 1.6, True),  # 0.8 × 2
        (0.9, -2.0, 1.8, False),
        (1.5, -2.0, 3.0, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clipped_loss_is_the_one_worked_out_by_hand(ratio: float, advantage: float, loss: float, is_clipped: bool) -> None:
    old = tensor(-1.0)
    new = (old + math.log(ratio)).requires_grad_()
    result = clipped_policy_loss(new, old, tensor(advantage), clip_low=0.2, clip_high=0.3)
    assert result.loss_N.item() == pytest.approx(loss)
    assert result.is_clipped_N.item() is is_clipped
    (gradient,) = torch.autograd.grad(result.loss_N.sum(), new)
    assert gradient.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage)


def test_on_policy_gradient_is_minus_advantage_times_gradient_of_logprob() -> None:
    logits = torch.randn(5, 7, dtype=double, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens, advantages = torch.tensor([0, 3, 6, 2, 2]), tensor(1, -1, 0.5, 0, 2)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    loss = clipped_policy_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2).loss_N
    (gradient,) = torch.autograd.grad(token_mean(loss, 5), logits)
    one_hot = torch.nn.functional.one_hot(tokens, 7)
    expected = -advantages[:, None] * (one_hot - logits.detach().softmax(-1)) / 5
    torch.testing.assert_close(gradient, expected)


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    old, new, advantages, reference = (torch.randn(12, dtype=double, generator=generator) * 0.3 for _ in range(4))

    def loss(x: torch.Tensor) -> torch.Tensor:
        policy = clipped_policy_loss(x, old, advantages, clip_low=0.2, clip_high=0.28)
        return token_mean(policy.loss_N * importance_weights(old, reference, cap=1.1) + 0.1 * kl_estimate(x, reference), 12)

    assert torch.autograd.gradcheck(loss, new.requires_grad_())


def test_importance_weights_are_capped_constants() -> None:
    old = tensor(-1.0, -1.0, -1.0).requires_grad_()
    weights = importance_weights(old, tensor(-1.0, -2.0, -0.5), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weights.requires_grad


# ── estimators ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_expectation_of_the_kl_estimate_is_the_kl() -> None:
    generator = torch.Generator().manual_seed(2)
    policy, reference = (torch.randn(9, dtype=double, generator=generator).log_softmax(-1) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    estimates = kl_estimate(policy, reference)
    assert (estimates >= 0).all()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact)
    assert kl_estimate(policy, policy).abs().max() == 0


def test_entropy_is_that_of_the_distribution_and_survives_impossible_tokens() -> None:
    uniform = torch.full((2, 8), -math.log(8), dtype=double)
    assert entropy(uniform).tolist() == pytest.approx([math.log(8)] * 2)
    certain = tensor(0.0, -math.inf, -math.inf)[None]
    assert entropy(certain).tolist() == [0.0]
    logits = torch.randn(4, 6, dtype=double, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(entropy(logits.log_softmax(-1)), torch.distributions.Categorical(logits=logits).entropy())


def test_token_means_of_parts_add_up_to_the_mean_of_all() -> None:
    values = torch.arange(10, dtype=double)
    parts = [token_mean(part, 10) for part in values.split([1, 6, 3])]
    assert float(sum(parts)) == pytest.approx(values.mean().item())
