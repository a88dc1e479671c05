"""The referee's law against the engine's, and its logits in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lossless.helpers import law_probabilities
from tlt.apps.audit.referee import Referee, law
from tlt.base.types import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
        SamplingParams(top_k=1000),
        SamplingParams(top_k=1),
    ],
)
def test_the_audit_s_law_is_the_engine_s_law(params: SamplingParams) -> None:
    logits_TV = torch.randn(200, 40, generator=torch.Generator().manual_seed(1)) * 2
    logits_TV[:50] = logits_TV[:50].round()  # many ties
    found = law(logits_TV, params).logp_TV.exp()
    expected = torch.stack([law_probabilities(row, params) for row in logits_TV])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(found > 0, expected > 0)


def test_the_referee_gives_the_same_logits_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    referee = Referee(model, torch.float64)
    prompt, tokens = (3, 4, 5), tuple(i % 23 for i in range(50))
    (whole,) = referee.logits(prompt, tokens)
    monkeypatch.setattr("tlt.apps.audit.referee._CHUNK_LOGITS", 1)
    pieces = list(referee.logits(prompt, tokens))
    assert len(pieces) == 4
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-10)
    assert whole.shape == (50, 23)
