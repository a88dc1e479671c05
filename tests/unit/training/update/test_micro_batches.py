"""Who computes what in a policy update, and at what learning rate: pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.base.config.schema import OptimizerSection
from tlt.base.types import Rollout
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.update.micro_batches import (
    Experience,
    Shares,
    families_of,
    plan_micro_batches,
    plan_ranks,
    plan_share,
    sequence_cost,
)
from tlt.training.update.schedule import learning_rate

CONFIG = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8)


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
    tokens = sum(lengths)
    assert len(batches) <= max(1, 2 * math.ceil(tokens / budget)) + sum(length > budget for length in lengths)


@given(
    st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=9), max_size=12),
    st.floats(0, 50),
    st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_ranks_differ_by_at_most_the_largest_response_with_its_prompt(
    costs: list[list[float]], prompt: float, num_ranks: int
) -> None:
    """And the rank with most has no more than if no prompt were shared."""
    own = [cost for family in costs for cost in family]
    places = iter(range(len(own)))
    families = [[next(places) for _ in family] for family in costs]
    shares = plan_ranks(families, own, num_ranks, [prompt] * len(families))
    assert sorted(i for share in shares for items in share.values() for i in items) == list(range(len(own)))
    assert all(set(items) <= set(families[family]) for share in shares for family, items in share.items())

    def largest(shares: Shares) -> float:
        return max(sum(prompt + sum(own[i] for i in items) for items in share.values()) for share in shares)

    singles, whole = [[i] for i in range(len(own))], [cost + prompt for cost in own]
    alone = plan_ranks(singles, whole, num_ranks, [0.0] * len(own))
    loads = [sum(own[i] + prompt for items in share.values() for i in items) for share in alone]
    assert max(loads) - min(loads) <= max(own, default=0) + prompt + 1e-9
    assert largest(shares) <= max(loads) + 1e-9


def test_a_rank_pays_for_the_prompt_of_every_family_it_has() -> None:
    shares = plan_ranks([[0], [1], [2], [3]], [120, 1, 1, 1], 2, [0, 100, 100, 100])
    assert shares == [{0: [0], 3: [3]}, {1: [1], 2: [2]}], "221 and 202; without prompts 120 and 3"


def of_one_prompt(number: int, num_prompt: int, own: list[int], needs_grad: bool = True) -> list[Experience]:
    """Responses of which the model reads `own` tokens."""
    return [
        Experience(
            Rollout(f"p{number}", s, (number,) * num_prompt, (1,) * (n + 1), (0.0,) * (n + 1), "stop", 0),
            (),
            needs_grad,
        )
        for s, n in enumerate(own)
    ]


FAMILIES = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 300), min_size=1, max_size=9)), max_size=8
)


@given(FAMILIES, st.integers(1, 400), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_prompt_counts_once_for_all_responses_of_a_micro_batch(
    given_: list[tuple[int, list[int]]], budget: int, num_ranks: int
) -> None:
    responses = [r for i, (num_prompt, own) in enumerate(given_) for r in of_one_prompt(i, num_prompt, own)]
    batches = [b for rank in range(num_ranks) for b in plan_share(responses, CONFIG, budget, num_ranks, rank)]
    assert sorted(id(r) for batch in batches for r in batch.responses) == sorted(map(id, responses))
    for batch in batches:
        mine = batch.responses
        families = families_of(mine)
        assert [i for family in families for i in family] == list(range(len(mine))), "families lie together"
        num_tokens = sum(mine[f[0]].num_prompt + sum(mine[i].num_own for i in f) for f in families)
        assert num_tokens <= budget or len(mine) == 1 or not any(r.num_own for r in mine[1:])


def test_a_tokens_products_are_those_of_a_layers_matrices_and_attention_is_paid_by_the_square() -> None:
    layer = Transformer(CONFIG).model.layers[0]
    num_weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    scores = CONFIG.num_heads * CONFIG.head_dim  # 2 products forward and 5 backward; a matrix has 1 and 2
    for length in (1, 7, 300):
        expected = length + length**2 * (2 + 5) * scores / (num_weights * (1 + 2))
        assert sequence_cost(length, CONFIG) == pytest.approx(expected)


def response(number: int, length: int, needs_grad: bool, weight: float) -> Experience:
    rollout = Rollout(f"p{number}", 0, (1,), (1,) * length, (0.0,) * length, "stop", 0)
    return Experience(rollout, (1.0,) * length, needs_grad, weight)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from([0.0, 1.0])), max_size=20),
    st.integers(1, 400),
    st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_equal_shares_are_the_plain_ones_and_dummies(
    given_: list[tuple[int, bool, float]], budget: int, num_ranks: int
) -> None:
    """Every rank has as many micro-batches with a backward pass as any other, before as many without;
    dummies count nothing."""
    responses = [response(i, *values) for i, values in enumerate(given_)]
    equal, plain = (
        [plan_share(responses, CONFIG, budget, num_ranks, rank, fills_up) for rank in range(num_ranks)]
        for fills_up in (True, False)
    )
    assert len({tuple(batch.needs_grad for batch in share) for share in equal}) == 1
    kinds = [batch.needs_grad for batch in equal[0]]
    assert kinds == sorted(kinds, reverse=True)
    most = [max(sum(b.needs_grad == kind for b in share) for share in plain) for kind in (False, True)]
    assert max(map(len, equal)) <= sum(most)
    for mine, theirs in zip(equal, plain, strict=True):
        assert [b.responses for b in mine if not b.is_dummy] == [b.responses for b in theirs]
        for (dummy,) in (batch.responses for batch in mine if batch.is_dummy):
            assert (dummy.length, dummy.num_in_loss, {*dummy.advantages}) == (2, 0, {0.0})


def test_learning_rates_follow_the_schedule() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        config = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=warmup)
        return [learning_rate(config, step, 8) for step in range(8)]

    assert rates("constant", 0) == [1.0] * 8
    assert rates("constant", 4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates("linear", 4) == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    cosine = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates("cosine", 0) == pytest.approx(cosine)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_only_the_constant_schedule_is_the_same_whatever_the_number_of_steps(schedule: str) -> None:
    """So only with that one may a run be resumed with another number."""
    config = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    short, long = ([learning_rate(config, step, num_steps) for step in range(8)] for num_steps in (8, 16))
    assert config.depends_on_num_steps == (short != long)


def test_a_response_without_gradient_costs_a_third_where_ranks_are_balanced() -> None:
    """Three forwards take as long as one forward and backward: one rank has these, the other that."""
    responses = [response(0, 90, True, 1.0), *(response(number, 90, False, 1.0) for number in range(1, 4))]
    shares = [plan_share(responses, CONFIG, 10_000, 2, rank) for rank in range(2)]
    found = [sorted(r.rollout.problem_id for batch in share for r in batch.responses) for share in shares]
    assert sorted(found) == [["p0"], ["p1", "p2", "p3"]]
