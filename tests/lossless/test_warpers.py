"""The law's distribution is transformers': its own warpers, in the order in which `generate` applies them.

    logits → temperature → top-k → top-p → min-p → softmax

The two differ only in ties at the border. The law ranks equal tokens by id and keeps as many as it was told.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.lossless.helpers import VOCAB, law_probabilities, make_policy, to_transformers
from tlt.base.types import SamplingParams
from tlt.speculation.law.params import BatchParams, truncate

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


# ── ties at the border ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("params", [SamplingParams(top_k=50), SamplingParams(top_p=0.7)])
def test_of_equal_tokens_at_the_border_the_law_keeps_the_lowest_ids(
    params: SamplingParams, seed: int
) -> None:
    """Transformers' top-k keeps all that equal the k-th; its top-p as many as the law, but others."""
    logits_V = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed)).double()
    ours, theirs = kept(logits_V, params)
    tied = {v for v in range(200) if logits_V[v] == min(logits_V[u].item() for u in ours)}
    assert len(ours) == 50 < len(theirs) if params.top_k else len(ours) == len(theirs)
    assert ours - tied == theirs - tied
    assert ours & tied == set(sorted(tied)[: len(ours & tied)]), "the lowest ids"
    assert ours != theirs
    ours, theirs = kept(logits_V, SamplingParams(min_p=0.04))
    assert ours == theirs, "min-p has no border"


def test_top_p_adds_up_the_mass_in_float64() -> None:
    """Beside one likely token each of 4,000 has a mass of 1e-8, which float32 cannot add to nearly 1."""
    logits_V = torch.cat([torch.zeros(1), torch.linspace(-18.4, -18.5, 4000)])
    masses = logits_V.double().softmax(0).tolist()
    for num_kept in (2, 100, 3001):
        top_p = math.fsum(masses[:num_kept]) - 0.5 * masses[num_kept - 1]
        params = BatchParams.of([SamplingParams(top_p=top_p)])
        kept = truncate(params.scale(logits_V[None, None]), params).isfinite()
        assert int(kept.sum()) == num_kept
