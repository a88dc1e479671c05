"""The law's distribution is transformers': its own warpers, in the order in which `generate` applies them.

    logits → temperature → top-k → top-p → min-p → softmax         which tokens stay, their probabilities, and what is drawn

The two differ in ties at the border alone. The law ranks equal tokens by id and keeps as many as it was told.
Transformers' top-k keeps all that equal the k-th; its top-p keeps as many of them as the law, but others.

Error rate: ten chi-square tests with fixed seeds, each failing a correct law with probability ALPHA =
1e-6; together 1e-5.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.lossless.helpers import VOCAB, fit, law_probabilities, make_policy, to_transformers
from tlt.speculative.params import BatchParams
from tlt.speculative.rows import draw
from tlt.speculative.sampling import keys_tensor
from tlt.types import SamplingParams

ALPHA = 1e-6
NUM_DRAWS = 1 << 14
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.4, top_k=20, top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.2, top_k=40, min_p=0.02),
    SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.03),
]


def warped(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """Returns what transformers' warpers make of the logits; -inf where a token is removed."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    result: Tensor = warpers(torch.zeros(len(logits_RV), 1, dtype=torch.int64), logits_RV)
    return result


def kept(logits_V: Tensor, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Returns the tokens that the law keeps, and that transformers does."""
    ours = law_probabilities(logits_V, params) > 0
    theirs = warped(logits_V[None], params)[0] > -math.inf
    return set(ours.nonzero()[:, 0].tolist()), set(theirs.nonzero()[:, 0].tolist())


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """float64 rows from flat to sharp."""
    spread_R1 = torch.linspace(0.5, 5.0, num_rows, dtype=torch.float64)[:, None]
    return (
        torch.randn(num_rows, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        * spread_R1
    )


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("vocab_size", [VOCAB, 1003])
def test_the_same_tokens_stay_and_have_the_same_probabilities(
    params: SamplingParams, vocab_size: int
) -> None:
    logits_RV = make_logits(12, vocab_size)
    expected_RV = warped(logits_RV, params).softmax(-1)
    found_RV = torch.stack([law_probabilities(logits_V, params) for logits_V in logits_RV])
    assert torch.equal(found_RV > 0, expected_RV > 0)
    torch.testing.assert_close(found_RV, expected_RV, rtol=0, atol=1e-12)
    assert not params.truncates or bool((found_RV == 0).any(-1).all()), "something was removed from every row"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.floats(-6, 6, allow_nan=False, width=32), min_size=2, max_size=20, unique_by=lambda x: round(x, 3)
    ),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
        top_k=st.sampled_from([0, 1, 2, 5, 100]),
        top_p=st.sampled_from([0.01, 0.3, 0.77, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
    ),
)
def test_of_a_few_tokens_the_same_ones_stay(logits: list[float], params: SamplingParams) -> None:
    ours, theirs = kept(torch.tensor(logits, dtype=torch.float64), params)
    assert ours == theirs


@pytest.mark.parametrize("params", PARAMS)
def test_the_order_is_that_of_generate(params: SamplingParams) -> None:
    """`generate` itself says what it samples from. It computes in float32, so probabilities agree to its
    last digits."""
    model = to_transformers(make_policy(seed=3, std=0.2))
    options = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    torch.manual_seed(0)
    said = model.generate(
        torch.arange(36).view(12, 3),
        attention_mask=torch.ones(12, 3, dtype=torch.int64),
        do_sample=True,
        max_new_tokens=1,
        pad_token_id=0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    expected_RV = said.scores[0].double().softmax(-1)
    found_RV = torch.stack([law_probabilities(logits_V, params) for logits_V in said.logits[0]])
    assert torch.equal(found_RV > 0, expected_RV > 0)
    torch.testing.assert_close(found_RV, expected_RV, rtol=0, atol=1e-5)


def drawn(logits_V: Tensor, params: SamplingParams, seed: int) -> Tensor:
    """Returns the tokens that the law draws at many positions of one key."""
    keys_R4 = keys_tensor([(seed, 1, 2, 3)]).expand(NUM_DRAWS, -1)
    return draw(
        logits_V.expand(NUM_DRAWS, -1), keys_R4, torch.arange(NUM_DRAWS), BatchParams([params] * NUM_DRAWS)
    )[0]


@pytest.mark.parametrize("params", PARAMS)
def test_what_is_drawn_has_transformers_probabilities(params: SamplingParams) -> None:
    """False-positive rate 1e-5 for all ten together."""
    logits_V = make_logits(1, VOCAB, seed=PARAMS.index(params))[0] * 3
    expected = warped(logits_V[None], params).softmax(-1)[0].numpy()
    assert fit(drawn(logits_V, params, seed=PARAMS.index(params)), expected) > ALPHA


def test_another_temperature_or_order_would_be_noticed() -> None:
    logits_V = make_logits(1, VOCAB)[0] * 3
    tokens = drawn(logits_V, SamplingParams(temperature=1.3, top_k=30, top_p=0.9), seed=0)
    for other in (
        SamplingParams(temperature=1.2, top_k=30, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=30, top_p=0.85),
    ):
        assert fit(tokens, warped(logits_V[None], other).softmax(-1)[0].numpy()) < ALPHA
    before = TopKLogitsWarper(30)(
        torch.zeros(1, 1), TopPLogitsWarper(0.9)(torch.zeros(1, 1), logits_V[None] / 1.3)
    )
    assert fit(tokens, before.softmax(-1)[0].numpy()) < ALPHA, "top-p before top-k"


# ── ties at the border ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(5))
def test_at_the_border_of_top_k_the_law_keeps_k_and_transformers_all_that_are_equal(seed: int) -> None:
    logits_V = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed)).double()
    ours, theirs = kept(logits_V, SamplingParams(top_k=50))
    border = min(logits_V[v].item() for v in ours)
    tied = sorted(v for v in theirs if logits_V[v] == border)
    assert len(ours) == 50 < len(theirs)
    assert ours - set(tied) == theirs - set(tied)
    assert sorted(ours & set(tied)) == tied[: len(ours & set(tied))], "the lowest ids"


@pytest.mark.parametrize("seed", range(5))
def test_at_the_border_of_top_p_both_keep_as_many_of_the_equal_ones(seed: int) -> None:
    logits_V = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed)).double()
    ours, theirs = kept(logits_V, SamplingParams(top_p=0.7))
    border = min(logits_V[v].item() for v in ours)
    tied = [v for v in range(200) if logits_V[v] == border]
    assert len(ours) == len(theirs)
    assert ours - set(tied) == theirs - set(tied)
    assert sorted(ours & set(tied)) == tied[: len(ours & set(tied))], "the lowest ids"
    assert ours != theirs


@pytest.mark.parametrize("seed", range(5))
def test_ties_make_no_difference_to_min_p(seed: int) -> None:
    logits_V = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed)).double()
    ours, theirs = kept(logits_V, SamplingParams(min_p=0.04))
    assert ours == theirs
    assert np.isin([logits_V[v].item() for v in ours], [2, 3, 4, 5]).all()
