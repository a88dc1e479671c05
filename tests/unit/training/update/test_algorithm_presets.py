"""Every algorithm by name against its paper's formula, written out in numpy for one response after the
other; whatever the micro-batches. Against TRL: tests/referee/test_trl_losses.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.unit.training.update.algorithm_parts import (
    MAX_TOKENS,
    Case,
    make_case,
    update_by_table,
    with_rewards,
)
from tlt.base.config.algorithm import ALGORITHMS, AlgorithmSection, Name
from tlt.base.config.load import load_config
from tlt.base.types import Reward, Rollout, UserError
from tlt.training.update.advantages import make_experiences
from tlt.training.update.algorithms import STD_FLOOR

Array = NDArray[np.float64]
CASE = make_case()


def parts(case: Case, flat: Any) -> list[Array]:
    """One array for each response."""
    return np.split(np.asarray(flat, dtype=np.float64), np.cumsum(case.lengths)[:-1])


def by_group(case: Case, values: Any) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1, case.num_samples)


def group_std(case: Case, values: Any) -> Array:
    r = by_group(case, values)
    return ((r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + STD_FLOOR)).ravel()


def with_group_std(case: Case, flat: Array) -> Iterator[tuple[Array, Array, float]]:
    """New and old log-probabilities and the advantage of each response."""
    return zip(parts(case, flat), parts(case, case.old), group_std(case, case.values), strict=True)


def ppo(ratio: Any, advantage: Any, low: float, high: float) -> Any:
    return -np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)


# Each takes log-probabilities and gives the loss. `fixed` are those that stop-gradients see.


def grpo(case: Case, flat: Array, fixed: Array) -> float:
    terms = [ppo(np.exp(new - old), a, 0.8, 1.28) for new, old, a in with_group_std(case, flat)]
    return float(np.concatenate(terms).mean())


def dr_grpo(case: Case, flat: Array, fixed: Array) -> float:
    r = by_group(case, case.values)
    advantages = (r - r.mean(1, keepdims=True)).ravel()
    terms = [
        ppo(np.exp(new - old), a, 0.8, 1.2).sum() / MAX_TOKENS
        for new, old, a in zip(parts(case, flat), parts(case, case.old), advantages, strict=True)
    ]
    return float(np.mean(terms))


def dapo(case: Case, flat: Array, fixed: Array) -> float:
    """Equations 8 and 13; the buffer is a fifth of the longest response."""
    cache = MAX_TOKENS // 5
    rewards = []
    for value, length in zip(case.values, case.lengths, strict=True):
        over = 0.0 if length <= MAX_TOKENS - cache else ((MAX_TOKENS - cache) - length) / cache
        rewards.append(value + over)
    return grpo(with_rewards(case, rewards), flat, fixed)


def rloo(case: Case, flat: Array, fixed: Array) -> float:
    losses = []
    for i, (new, old) in enumerate(zip(parts(case, flat), parts(case, case.old), strict=True)):
        group = list(case.values[i // case.num_samples * case.num_samples :][: case.num_samples])
        mine = group.pop(i % case.num_samples)
        losses.append(ppo(np.exp(new.sum() - old.sum()), mine - np.mean(group), 0.8, 1.2))
    return float(np.mean(losses))


def reinforce(case: Case, flat: Array, fixed: Array, beta: float = 0.0) -> float:
    """With a KL penalty of k1 at every token, of the policy that sampled; returns count to the response's
    end."""
    returns = []
    for r, kl in zip(case.values, parts(case, case.old - case.reference), strict=True):
        returns.append(np.array([r - beta * kl[t:].sum() for t in range(len(kl))]))
    every = np.concatenate(returns)
    terms = [
        ppo(np.exp(new - old), (g - every.mean()) / (every.std() + STD_FLOOR), 0.8, 1.2)
        for new, old, g in zip(parts(case, flat), parts(case, case.old), returns, strict=True)
    ]
    return float(np.concatenate(terms).mean())


def gspo(case: Case, flat: Array, fixed: Array) -> float:
    ratios = [(np.exp((new - old).mean()), a) for new, old, a in with_group_std(case, flat)]
    return float(np.mean([ppo(ratio, a, 1 - 3e-4, 1 + 4e-4) for ratio, a in ratios]))


def cispo(case: Case, flat: Array, fixed: Array) -> float:
    advantages = np.repeat(group_std(case, case.values), case.lengths)
    return float((-np.minimum(np.exp(fixed - case.old.numpy()), 5.0) * advantages * flat).mean())


FORMULAS: dict[str, Callable[[Case, Array, Array], float]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce++": reinforce,
    "gspo": gspo,
    "cispo": cispo,
}


def slopes(formula: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """The gradient by central differences."""
    moves = np.eye(len(at)) * step
    return np.array([(formula(at + move) - formula(at - move)) / (2 * step) for move in moves])


def check(formula: Callable[[Array, Array], float], case: Case, **algorithm: Any) -> None:
    """Our loss and gradient are the formula's, in micro-batches of any size."""
    new = case.new.numpy()
    loss, gradient = formula(new, new), slopes(lambda flat: formula(flat, new), new)
    assert np.abs(gradient).max() > 1e-3
    for budget in (1, 64, 10_000):
        ours, slope = update_by_table(case, budget, **algorithm)
        assert ours == pytest.approx(loss, abs=1e-12)
        np.testing.assert_allclose(slope.numpy(), gradient, atol=1e-8)


def test_every_name_has_a_preset_and_a_formula_here() -> None:
    assert set(get_args(Name)) == set(ALGORITHMS) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_the_update_by_name_is_the_papers_formula(name: Any, spread: float) -> None:
    case = make_case(spread=spread)
    check(lambda flat, fixed: FORMULAS[name](case, flat, fixed), case, name=name)


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "gspo"])
def test_a_kl_in_the_loss_is_added_to_every_token_before_the_mean(name: Any) -> None:
    """k2 and k3 of each token, in the mean that the algorithm takes."""
    reference = CASE.reference.numpy()
    for estimator in ("k2", "k3"):

        def formula(flat: Array, fixed: Array, estimator: str = estimator) -> float:
            log_r = reference - flat
            kl = log_r**2 / 2 if estimator == "k2" else np.exp(log_r) - log_r - 1
            mean = {
                "grpo": kl.mean(),
                "dr-grpo": kl.sum() / (len(CASE.rollouts) * MAX_TOKENS),
                "gspo": np.mean([part.mean() for part in parts(CASE, kl)]),
            }[name]
            return FORMULAS[name](CASE, flat, fixed) + 0.3 * float(mean)

        check(formula, CASE, name=name, kl_coefficient=0.3, kl_estimator=estimator)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_corrected_kl_is_weighed_by_the_tokens_ratio_which_has_a_gradient(
    name: str, estimator: Any
) -> None:
    old, reference = CASE.old.numpy(), CASE.reference.numpy()

    def formula(flat: Array, fixed: Array) -> float:
        log_r = reference - flat
        kl = -log_r if estimator == "k1" else np.exp(log_r) - log_r - 1
        weighed = np.exp(flat - old) * kl
        mean = weighed.mean() if name == "grpo" else np.mean([part.mean() for part in parts(CASE, weighed)])
        return FORMULAS[name](CASE, flat, fixed) + 0.3 * float(mean)

    check(formula, CASE, name=name, kl_coefficient=0.3, kl_estimator=estimator, kl_bias_correction=True)


def test_a_kl_in_the_reward_is_a_responses_sum_for_rloo_and_what_is_still_to_come_for_reinforce() -> None:
    kl = [float(part.sum()) for part in parts(CASE, CASE.old - CASE.reference)]
    penalized = with_rewards(CASE, [value - 0.2 * of for value, of in zip(CASE.values, kl, strict=True)])
    check(lambda flat, fixed: rloo(penalized, flat, fixed), CASE, name="rloo", kl_coefficient=0.2)
    check(lambda flat, fixed: reinforce(CASE, flat, fixed, 0.2), CASE, name="reinforce++", kl_coefficient=0.2)


def test_a_response_whose_first_token_has_no_advantage_still_gets_a_gradient_for_the_others() -> None:
    rollouts = [Rollout("p", index, (3,), (4, 7), (-1.0, -1.0), "stop", 0) for index in range(2)]
    rewards = [Reward(1.0, True), Reward(-1.0, False)]
    kl = [torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([-1.0, 0.0], dtype=torch.float64)]
    settings = AlgorithmSection(name="reinforce++", kl_coefficient=1.0)
    responses, num_zero_advantage = make_experiences(rollouts, rewards, settings, settings.resolve(9), kl)
    assert [response.advantages[0] for response in responses] == [0, 0]
    assert [response.advantages[1] for response in responses] == pytest.approx([2**0.5, -(2**0.5)], abs=1e-5)
    assert all(response.needs_grad for response in responses)
    assert num_zero_advantage == 0


def test_truncated_responses_are_left_out_of_the_loss_and_stay_in_their_groups() -> None:
    is_cut = [rollout.finish_reason == "length" for rollout in CASE.rollouts]
    token_in_loss = np.repeat(np.logical_not(is_cut), CASE.lengths)
    assert 0 < token_in_loss.sum() < len(token_in_loss)
    advantages = np.repeat(group_std(CASE, CASE.values), CASE.lengths)

    def by_token(flat: Array, fixed: Array) -> float:
        terms = ppo(np.exp(flat - CASE.old.numpy()), advantages, 0.8, 1.28)
        return float(terms[token_in_loss].mean())

    check(by_token, CASE, mask_truncated=True)

    def by_response(flat: Array, fixed: Array) -> float:
        log_r = CASE.reference.numpy() - flat
        terms = ppo(np.exp(flat - CASE.old.numpy()), advantages, 0.8, 1.28)
        terms += 0.3 * (np.exp(log_r) - log_r - 1)
        means = [0.0 if cut else part.mean() for cut, part in zip(is_cut, parts(CASE, terms), strict=True)]
        return float(np.mean(means))

    check(by_response, CASE, mask_truncated=True, aggregation="sequence", kl_coefficient=0.3)


def test_a_key_of_its_own_overrides_the_presets_choice_and_nothing_else() -> None:
    plain = AlgorithmSection(name="gspo").resolve(100)
    assert AlgorithmSection(name="gspo", clip_high=0.1).resolve(100) == replace(plain, clip_high=0.1)
    same = AlgorithmSection(ratio="sequence", aggregation="sequence", clip_low=3e-4, clip_high=4e-4)
    assert replace(same.resolve(100), name="gspo") == plain


def test_k1_in_the_loss_is_refused_and_so_is_a_correction_of_the_reward() -> None:
    with pytest.raises(ValidationError, match="kl_bias_correction is for a KL in the loss"):
        AlgorithmSection(name="rloo", kl_coefficient=0.1, kl_bias_correction=True)
    with pytest.raises(ValidationError, match="gradient of mean 0"):
        AlgorithmSection(kl_coefficient=0.1, kl_estimator="k1")
    with pytest.raises(ValidationError, match="gradient of mean 0"):
        AlgorithmSection(name="rloo", kl_coefficient=0.1, kl_in="loss")
    with pytest.raises(ValidationError, match="kl_estimator is set, but kl_coefficient is 0"):
        AlgorithmSection(kl_estimator="k1")


def test_a_buffer_longer_than_the_longest_response_is_refused_in_one_line() -> None:
    refusal = r"overlong_buffer_tokens is 2000 but sampling.max_tokens only 1024: lower it"
    with pytest.raises(UserError, match=refusal) as refused:
        load_config("countdown", ["--algorithm.overlong_buffer_tokens", "2000"])
    assert "\n" not in str(refused.value)
