"""Advantages, losses and estimators against numbers worked out by hand, plain loops, enumeration and finite
differences. Whole algorithms: test_algorithm_presets.py."""

from __future__ import annotations

import math
import statistics
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.training.update.algorithms import (
    STD_FLOOR,
    entropy,
    group_advantages,
    kl_estimate,
    loss_divisor,
    whitened_advantages,
)
from tlt.training.update.gradients import Sharded

double = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=double)


# ── advantages ──────────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_masked_response_has_no_tokens_but_is_one_of_the_responses() -> None:
    assert [loss_divisor([0, 6, 3], name, 8) for name in ("token", "sequence", "constant")] == [9, 3, 24]
    assert loss_divisor([0, 0], "token", 8) == 1


def test_where_slices_are_reduced_a_missing_gradient_is_0_and_its_parameter_still_decays() -> None:
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    gradients = Sharded(cast("Any", None), [used, unused], cast("Any", None))
    used.sum().backward()
    gradients.reduce()
    assert used.grad is not None
    assert used.grad.tolist() == [1, 1]
    assert unused.grad is not None
    assert unused.grad.tolist() == [0, 0]
