"""With the engine's numbers, the update's log-probabilities are the engine's to the bit, and its gradients those
of its own computation at those numbers."""

from __future__ import annotations

import pytest
import torch

from tlt.base.speculation import parse_speculation
from tlt.base.types import Request, SamplingParams, id_of
from tlt.engine.build.engine import build_engine
from tlt.engine.equal_rows import EqualRows
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.settings import EngineSettings
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.update.logprobs import logprobs_of_rows, response_logprobs
from tlt.training.update.plan import Experience

pytest.importorskip("numba", reason="rows are equal in compiled loops")

CONFIG = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
PROMPTS = [tuple(range(5, 40)), tuple(range(2, 9))]


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG).initialize(0, std=0.15)


def engine_of(model: Transformer, dtype: torch.dtype, speculation: str) -> RolloutEngine:
    settings = EngineSettings(parse_speculation(speculation), dtype=dtype, max_batch_size=8)
    return build_engine(CONFIG, dict(model.named_parameters()), settings)


def responses_of(engine: RolloutEngine, params: SamplingParams) -> list[Experience]:
    requests = [Request(f"p{p}", s, prompt, params) for p, prompt in enumerate(PROMPTS) for s in range(3)]
    rollouts = sorted(engine.generate(requests), key=id_of)
    return [Experience(rollout, (), needs_grad=True) for rollout in rollouts]


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=70), SamplingParams(0.7, top_p=0.9, max_tokens=70)]
)
@pytest.mark.parametrize("speculation", ["off", "ngram:4x1x4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_updates_logprobs_are_the_engines_to_the_bit(
    model: Transformer, dtype: torch.dtype, speculation: str, params: SamplingParams
) -> None:
    engine = engine_of(model, dtype, speculation)
    batch = responses_of(engine, params)
    rows = EqualRows(engine.model, params, lambda: None)
    expected_T = torch.tensor([logprob for r in batch for logprob in r.rollout.logprobs])
    with_gradient_T, entropy_T = response_logprobs(model, batch, params.temperature, rows=rows)
    without_T, same_entropy_T = logprobs_of_rows(rows, batch)
    own_T, own_entropy_T = response_logprobs(model, batch, params.temperature)
    assert torch.equal(with_gradient_T, expected_T)
    assert torch.equal(without_T, expected_T)
    assert not torch.equal(own_T, expected_T), "else nothing is tested"
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(own_T, expected_T, rtol=0, atol=tolerance)
    for found_T in (entropy_T, same_entropy_T):
        torch.testing.assert_close(found_T, own_entropy_T, rtol=0, atol=tolerance)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_are_those_of_pytorch_at_the_same_numbers(model: Transformer, checkpoints: bool) -> None:
    params = SamplingParams(max_tokens=40)
    batch = responses_of(engine := engine_of(model, torch.float32, "off"), params)
    rows, gradients = EqualRows(engine.model, params, lambda: None), []
    model.checkpoints_activations = checkpoints
    for given in (rows, None):
        model.zero_grad()
        logprobs_T, _ = response_logprobs(model, batch, 1.0, rows=given)
        (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
