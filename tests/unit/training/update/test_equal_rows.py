"""With the engine's numbers, the update's log-probabilities are the engine's to the bit, and its gradients those
of its own computation at those numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.compared import config_of
from tests.unit.models.families import reference
from tests.unit.training.update.test_policy import OPTIMIZER
from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.sampling import SamplingSection
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request, Reward, SamplingParams, id_of
from tlt.engine.build.engine import build_engine
from tlt.engine.equal_rows import EqualRows
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.settings import EngineSettings
from tlt.models.any import AnyTransformer
from tlt.models.decoder import ModelConfig, Policy, Transformer
from tlt.training.update import update
from tlt.training.update.algorithms import importance_ratio
from tlt.training.update.gradients import gradients_of
from tlt.training.update.logprobs import logprobs_of_rows, response_logprobs
from tlt.training.update.micro_batches import Experience
from tlt.training.update.routes import Routes
from tlt.training.update.update import PolicyTrainer

pytest.importorskip("numba", reason="rows are equal in compiled loops")

CONFIG = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
PROMPTS = [tuple(range(5, 40)), tuple(range(2, 9))]


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG).initialize(0, std=0.15)


@pytest.fixture
def experts() -> AnyTransformer:
    own = AnyTransformer(config_of("Qwen3-30B-A3B"))
    stored = reference("Qwen3-30B-A3B", torch.float32).state_dict()
    own.load_state_dict({path: stored[path] for path in own.state_dict()})
    return own


def engine_of(model: Policy, dtype: torch.dtype, speculation: str) -> RolloutEngine:
    settings = EngineSettings(
        parse_speculation(speculation), dtype=dtype, max_batch_size=8, equal_rows=True, routes="all"
    )
    return build_engine(model.config, dict(model.named_parameters()), settings)


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
    rows = EqualRows(engine.target, params, lambda: None)
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
    rows, gradients = EqualRows(engine.target, params, lambda: None), []
    model.checkpoints_activations = checkpoints
    for given in (rows, None):
        model.zero_grad()
        logprobs_T, _ = response_logprobs(model, batch, 1.0, rows=given)
        (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_have_the_engines_logprobs_and_routes(experts: AnyTransformer, dtype: torch.dtype) -> None:
    params = SamplingParams(max_tokens=40)
    batch = responses_of(engine := engine_of(experts, dtype, "ngram:4x1x4"), params)
    rows = EqualRows(engine.target, params, lambda: None)
    expected_T = torch.tensor([logprob for r in batch for logprob in r.rollout.logprobs])
    for is_on in (True, False):
        routes = Routes(experts, torch.device("cpu"))
        with torch.set_grad_enabled(is_on):
            logprobs_T, _ = response_logprobs(experts, batch, 1.0, routes, rows)
        assert torch.equal(logprobs_T, expected_T)
        assert routes.metrics(None)["router_gap"] == 0


def test_gradients_of_experts_are_those_of_pytorch_at_the_same_numbers(experts: AnyTransformer) -> None:
    params = SamplingParams(max_tokens=40)
    batch = responses_of(engine := engine_of(experts, torch.float32, "off"), params)
    gradients = []
    for rows in (EqualRows(engine.target, params, lambda: None), None):
        experts.zero_grad()
        logprobs_T, _ = response_logprobs(experts, batch, 1.0, Routes(experts, torch.device("cpu")), rows)
        (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in experts.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3 * gradients[1].abs().max().item())


def test_the_ratio_of_a_first_minibatch_is_exactly_one(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=40)
    engine = engine_of(model, torch.bfloat16, "off")
    batch = responses_of(engine, params)
    section = AlgorithmSection(minibatches=2, tokens_per_micro_batch=4096)
    sampling, gradients = SamplingSection(max_tokens=40), gradients_of(model, None)
    load = partial(engine.target.load, dict(model.named_parameters()), 1)
    rows = EqualRows(engine.target, params, load)
    trainer = PolicyTrainer(model, section, OPTIMIZER, sampling, 10, gradients, rows=rows)
    ratios: list[Tensor] = []

    def noted(*given: Any) -> Tensor:
        ratios.append(importance_ratio(*given))
        return ratios[-1]

    monkeypatch.setattr(update, "importance_ratio", noted)
    rewards = [Reward(float(i % 3 == 0), i % 3 == 0) for i in range(len(batch))]
    found = trainer.update([r.rollout for r in batch], rewards, 0)
    assert found.engine_trainer_logprob_gap_max == 0
    assert len(ratios) == 2
    assert (ratios[0] == 1).all()
    assert not (ratios[1] == 1).all()
