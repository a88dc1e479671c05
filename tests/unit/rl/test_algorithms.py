"""Advantages, losses and estimators against numbers worked out by hand, plain loops, enumeration and finite
differences. Whole algorithms: test_algorithm_presets.py."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.rl.algorithms import (
    STD_FLOOR,
    cispo_loss,
    clipped_loss,
    entropy,
    group_advantages,
    importance_ratio,
    importance_weights,
    kl_estimate,
    loss_divisor,
    loss_weight,
    overlong_penalty,
    rewards_to_go,
    whitened_advantages,
)

double = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=double)


# ── advantages ──────────────────────────────────────────────────────────────────────────────────────────────


def test_advantages_of_one_solved_in_four_are_those_worked_out_by_hand() -> None:
    rewards, group = tensor(1, 0, 0, 0), torch.zeros(4, dtype=torch.long)
    for kind, first in (("group-std", 1.5), ("group-mean", 0.75), ("leave-one-out", 1)):
        values = [first, *[-first / 3] * 3]
        assert group_advantages(rewards, group, kind).tolist() == pytest.approx(values, abs=1e-5)  # std = 1/2


KINDS = ("group-std", "group-mean", "leave-one-out")
GROUP = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=5)


@given(
    st.lists(GROUP, min_size=1, max_size=5),
    st.sampled_from(KINDS),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_advantages_agree_with_a_plain_loop_over_interleaved_groups(groups, kind, random) -> None:
    pairs = [(group, value) for group, values in enumerate(groups) for value in values]
    random.shuffle(pairs)
    result = group_advantages(tensor(*(v for _, v in pairs)), torch.tensor([g for g, _ in pairs]), kind)
    expected = {}
    for group, values in enumerate(groups):
        is_flat = len(set(values)) == 1
        scale = statistics.stdev(values) + STD_FLOOR if kind == "group-std" and len(values) > 1 else 1.0
        for i, value in enumerate(values):
            others = values[:i] + values[i + 1 :] if kind == "leave-one-out" else values
            expected[group, value] = 0.0 if is_flat else (value - statistics.fmean(others)) / scale
    for pair, advantage in zip(pairs, result.tolist(), strict=True):
        assert advantage == pytest.approx(expected[pair], rel=1e-6, abs=1e-8)


def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_rounded() -> None:
    rewards = tensor(0.1, 0.1, 0.1)
    assert rewards.sum() / 3 != 0.1  # so that subtracting the mean would not do
    for kind in KINDS:
        assert group_advantages(rewards, torch.zeros(3, dtype=torch.long), kind).tolist() == [0, 0, 0]
    returns = [tensor(0.1, 0.1), tensor(0.1)]
    assert torch.cat(whitened_advantages(returns)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_alone_has_nothing_to_be_compared_with_and_no_advantage(kind: Any) -> None:
    assert group_advantages(tensor(1, 9, 0), torch.tensor([0, 1, 0]), kind)[1] == 0


def test_whitened_advantages_have_mean_zero_and_variance_one_over_all_tokens() -> None:
    values = [1, 1, 1, 0, -2, 0.5]
    parts = whitened_advantages([tensor(*values[:3]), tensor(*values[3:4]), tensor(*values[4:])])
    assert [len(part) for part in parts] == [3, 1, 2]
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    expected = [(value - mean) / (std + STD_FLOOR) for value in values]
    assert torch.cat(parts).tolist() == pytest.approx(expected)


def test_a_reward_comes_after_the_last_token_and_a_penalty_with_each() -> None:
    assert rewards_to_go(5.0, tensor(1, 2, 4)).tolist() == [-2, -1, 1]


def test_the_overlong_penalty_grows_from_nothing_to_one_within_its_buffer() -> None:
    assert [overlong_penalty(n, 20, 5) for n in (1, 15, 16, 19, 20)] == pytest.approx([0, 0, 0.2, 0.8, 1])
    assert overlong_penalty(20, 20, 0) == 0


# ── the policy loss ─────────────────────────────────────────────────────────────────────────────────────────


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
def test_clipped_loss_is_the_one_worked_out_by_hand(
    ratio: float, advantage: float, loss: float, is_clipped: bool
) -> None:
    old = tensor(-1.0)
    new = (old + math.log(ratio)).requires_grad_()
    result = clipped_loss((new - old).exp(), tensor(advantage), 0.8, 1.3)
    assert result.loss_T.item() == pytest.approx(loss)
    assert result.is_clipped_T.item() is is_clipped
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), new)
    assert gradient.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage)


@pytest.mark.parametrize(
    "kind",
    [
        lambda logprobs, ratio, advantages: clipped_loss(ratio, advantages, 0.8, 1.2).loss_T,
        lambda logprobs, ratio, advantages: cispo_loss(ratio, logprobs, advantages, 0.0, 5.0).loss_T,
    ],
    ids=["clipped", "cispo"],
)
def test_on_policy_gradient_is_minus_advantage_times_gradient_of_logprob(kind: Any) -> None:
    logits = torch.randn(5, 7, dtype=double, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens, advantages = torch.tensor([0, 3, 6, 2, 2]), tensor(1, -1, 0.5, 0, 2)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    loss = kind(logprobs, (logprobs - logprobs.detach()).exp(), advantages)
    (gradient,) = torch.autograd.grad(loss.sum() / 5, logits)
    one_hot = torch.nn.functional.one_hot(tokens, 7)
    expected = -advantages[:, None] * (one_hot - logits.detach().softmax(-1)) / 5
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("level", ["token", "sequence", "trajectory"])
def test_gradients_agree_with_finite_differences(level: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(4, 12, dtype=double, generator=generator) * 0.3
    old, new, advantages, reference = draws

    def loss(x: torch.Tensor) -> torch.Tensor:
        policy = clipped_loss(importance_ratio(x, old, (5, 7), level), advantages, 0.8, 1.28)
        corrected = policy.loss_T * importance_weights(old, reference, cap=1.1)
        return (corrected + 0.1 * kl_estimate(x, reference)).sum() / 12

    assert torch.autograd.gradcheck(loss, new.clone().requires_grad_())


def test_ratios_are_of_tokens_their_geometric_mean_or_their_product() -> None:
    old, new = tensor(-1, -1, -1, -1), torch.log(torch.exp(tensor(-1, -1, -1, -1)) * tensor(2, 4, 8, 0.5))
    assert importance_ratio(new, old, (3, 1), "token").tolist() == pytest.approx([2, 4, 8, 0.5])
    assert importance_ratio(new, old, (3, 1), "sequence").tolist() == pytest.approx([4, 4, 4, 0.5])
    assert importance_ratio(new, old, (3, 1), "trajectory").tolist() == pytest.approx([64, 64, 64, 0.5])


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    new = torch.log(tensor(0.1, 0.5, 0.9)).requires_grad_()
    ratio, advantages = (new - torch.log(tensor(0.1, 0.05, 0.3))).exp(), tensor(-1, 2, 2)  # 1, 10 and 3
    loss, is_clipped = cispo_loss(ratio, new, advantages, 0.0, 5.0)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == pytest.approx([1, -10, -6])
    assert is_clipped.tolist() == [False, True, False]


def test_importance_weights_are_capped_constants() -> None:
    old = tensor(-1.0, -1.0, -1.0).requires_grad_()
    weights = importance_weights(old, tensor(-1.0, -2.0, -0.5), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weights.requires_grad


# ── estimators ──────────────────────────────────────────────────────────────────────────────────────────────


def test_expectation_of_k1_and_k3_is_the_kl_and_k2_has_its_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, other = (torch.randn(9, dtype=double, generator=generator) for _ in range(2))
    reference = other.log_softmax(-1)
    policy = logits.requires_grad_().log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for name in ("k1", "k3"):
        estimates = kl_estimate(policy, reference, name)
        torch.testing.assert_close((policy.exp() * estimates).sum(), exact)
        assert bool((estimates >= 0).all()) == (name == "k3")
        assert kl_estimate(policy, policy, name).abs().max() == 0
    for name, expected in (("k2", gradient), ("k1", 0 * gradient)):  # so k1 is refused in the loss
        in_loss = (policy.exp().detach() * kl_estimate(policy, reference, name)).sum()
        (found,) = torch.autograd.grad(in_loss, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-7)


def test_entropy_is_that_of_the_distribution_and_survives_impossible_tokens() -> None:
    uniform = torch.full((2, 8), -math.log(8), dtype=double)
    assert entropy(uniform).tolist() == pytest.approx([math.log(8)] * 2)
    assert entropy(tensor(0.0, -math.inf, -math.inf)[None]).tolist() == [0.0]
    logits = torch.randn(4, 6, dtype=double, generator=torch.Generator().manual_seed(3))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits.log_softmax(-1)), expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", 45 / 10), ("sequence", (0 + 21 / 6 + 24 / 3) / 3), ("constant", 45 / (3 * 8))],
)
def test_parts_of_responses_add_up_to_the_mean_of_all(aggregation: Any, expected: float) -> None:
    parts = torch.arange(10, dtype=double).split([1, 6, 3])
    divisor = loss_divisor([1, 6, 3], aggregation, 8)
    total = sum(float(part.sum()) * loss_weight(len(part), aggregation) / divisor for part in parts)
    assert total == pytest.approx(expected)


def test_a_masked_response_has_no_tokens_but_is_one_of_the_responses() -> None:
    assert [loss_divisor([0, 6, 3], name, 8) for name in ("token", "sequence", "constant")] == [9, 3, 24]
    assert loss_divisor([0, 0], "token", 8) == 1
