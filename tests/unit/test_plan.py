"""Who computes what in a policy update, and at what learning rate: pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.config.schema import OptimizerSection
from tlt.models.decoder import ModelConfig
from tlt.rl.plan import Response, plan_equal_share, plan_micro_batches, plan_ranks, plan_share
from tlt.rl.schedule import learning_rate
from tlt.types import Rollout

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


@given(st.lists(st.floats(0.1, 100), max_size=40), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_ranks_differ_by_at_most_the_largest_sequence(costs: list[float], num_ranks: int) -> None:
    shares = plan_ranks(costs, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


def response(number: int, length: int, needs_grad: bool, weight: float) -> Response:
    tokens = (1,) * length
    return Response(Rollout(f"p{number}", 0, (1,), tokens, (0.0,) * length, "stop", 0), (1.0,) * length, needs_grad, weight)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from([0.0, 1.0])), max_size=20),
    st.integers(1, 400),
    st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_equal_shares_are_the_plain_ones_and_dummies(
    given_: list[tuple[int, bool, float]], budget: int, num_ranks: int
) -> None:
    """Every rank has as many micro-batches with a backward pass as any other, before as many without; dummies count nothing."""
    responses = [response(i, *values) for i, values in enumerate(given_)]
    equal = [plan_equal_share(responses, CONFIG, budget, num_ranks, rank) for rank in range(num_ranks)]
    plain = [plan_share(responses, CONFIG, budget, num_ranks, rank) for rank in range(num_ranks)]
    assert len({tuple(batch.needs_grad for batch in share) for share in equal}) == 1
    assert [batch.needs_grad for batch in equal[0]] == sorted((batch.needs_grad for batch in equal[0]), reverse=True)
    assert max(map(len, equal)) <= sum(max(sum(b.needs_grad == kind for b in share) for share in plain) for kind in (0, 1))
    for mine, theirs in zip(equal, plain, strict=True):
        assert [b.responses for b in mine if not b.is_dummy] == [b.responses for b in theirs]
        for batch in mine:
            if batch.is_dummy:
                (dummy,) = batch.responses
                assert (dummy.length, dummy.num_in_loss, dummy.weight, set(dummy.advantages)) == (2, 0, 0, {0.0})


def test_learning_rates_follow_the_schedule() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        config = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=warmup)
        return [learning_rate(config, step, 8) for step in range(8)]

    assert rates("constant", 0) == [1.0] * 8
    assert rates("constant", 4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates("linear", 4) == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine", 0) == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_only_the_constant_schedule_is_the_same_whatever_the_number_of_steps(schedule: str) -> None:
    """So only with that one may a run be resumed with another number."""
    config = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    short, long = ([learning_rate(config, step, num_steps) for step in range(8)] for num_steps in (8, 16))
    assert config.depends_on_num_steps == (short != long)
