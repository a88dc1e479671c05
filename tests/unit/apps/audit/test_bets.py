"""The bets by enumeration: none gains on average where tokens follow the law."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tlt.apps.audit.bets import BETS, EVENTS, SOURCES, OnlineNgrams, growth


def all_growth(logp_V: Tensor, tolerance: float) -> Tensor:
    """growth[K, V]: of every bet for every next token, with sources and sets of all kinds."""
    size = len(logp_V)
    generator = torch.Generator().manual_seed(5)
    tokens_ST = torch.arange(size)[:, None]
    sources_RV = torch.rand(len(SOURCES), size, generator=generator, dtype=torch.float64)
    sources_RV[3:] = torch.eye(size, dtype=torch.float64)[[1, 2]]
    sources_RV /= sources_RV.sum(-1, keepdim=True)
    ids = torch.arange(size)
    events_TV = [(ids < 2)[None], (ids == int(logp_V.argmax()))[None], (ids == -1)[None]]
    assert len(events_TV) == len(EVENTS)
    return growth(logp_V[None], tokens_ST, sources_RV[:, :, None], events_TV, tolerance)[:, :, 0]


def random_law(seed: int, truncated: bool) -> Tensor:
    logits_V = torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    if truncated:
        logits_V[[2, 5]] = -math.inf
    return logits_V.log_softmax(-1)


@pytest.mark.parametrize("truncated", [False, True])
def test_no_bet_gains_on_average_when_tokens_follow_the_law(truncated: bool) -> None:
    """By enumeration: E_p[q/p] is 1, or below it by the mass that q has where p has none."""
    for seed in range(20):
        logp_V = random_law(seed, truncated)
        factors_K = (all_growth(logp_V, 0.0).exp() * logp_V.exp()).sum(-1)
        assert float(factors_K.max()) <= 1 + 1e-12
        if not truncated:
            torch.testing.assert_close(
                factors_K, torch.ones(len(BETS), dtype=torch.float64), rtol=0, atol=1e-12
            )


def test_the_online_model_is_a_distribution_and_learns() -> None:
    ngrams = OnlineNgrams(5)
    assert ngrams.probabilities([1, 2], [3]) == [0.2]
    for _ in range(50):
        ngrams.learn([1, 2], 3)
    found = ngrams.probabilities([1, 2], range(5))
    assert sum(found) == pytest.approx(1.0)
    assert found[3] > 0.9
    assert sum(ngrams.probabilities([4, 4, 2], range(5))) == pytest.approx(1.0)
