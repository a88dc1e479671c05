"""The recipe experts: its experts are the dense base's neurons, and what they learned shows where random
experts tell little: drafts are accepted, rewards differ, routers choose by what they read."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import tlt
from recipes.experts.train_base import DENSE, upcycle, write
from recipes.pretrain import imbalance
from tests.lossless.helpers import Switching
from tests.unit.training.update.test_policy import OPTIMIZER
from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.sampling import SamplingSection
from tlt.base.io.recipes import find_recipe
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Reward, SamplingParams
from tlt.engine.build.model import load_model
from tlt.engine.own.engine import RolloutEngine
from tlt.models.any import AnyTarget, AnyTransformer
from tlt.models.any_config import AnyConfig
from tlt.tasks.countdown import TASK
from tlt.training.update.gradients import gradients_of
from tlt.training.update.update import PolicyTrainer, UpdateMetrics

BASE, DRAFTER = (find_recipe("experts").with_name(name) for name in ("base", "drafter"))
PROBLEMS = TASK.problems(8, 0, split="test", mix={2: 0.5, 3: 0.5}, max_number=10, max_target=60)
BY_ID = {problem["problem_id"]: problem for problem in PROBLEMS}


@torch.no_grad()
def test_the_model_is_the_dense_one_where_a_token_takes_all_experts() -> None:
    tokens = torch.tensor([write(random.Random(0), max_chars=200)[0]])
    dense = AutoModelForCausalLM.from_pretrained(DENSE, dtype=torch.float32)
    wanted_NV = dense(tokens).logits[0].log_softmax(-1)
    found = [upcycle(8, top_k, num_documents=1)(tokens).logits[0].log_softmax(-1) for top_k in (8, 2)]
    apart = [float((found_NV - wanted_NV).abs().max()) for found_NV in found]
    assert apart[0] < 1e-3
    assert apart[1] > 0.1


def test_the_loss_that_balances_experts_is_the_one_of_transformers_a_layer_at_a_time() -> None:
    logits_RNX = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0))
    theirs = [float(load_balancing_loss_func((logits_NX,), 8, top_k=2)) / 2 for logits_NX in logits_RNX]
    assert float(imbalance([*logits_RNX], 2)) == pytest.approx(sum(theirs) / 3)


def test_the_model_solves_puzzles_and_drafts_change_no_token() -> None:
    modes = {"off": None, "4x2x8": DRAFTER}
    tokens = []
    for speculation, drafter in modes.items():
        engine = tlt.Engine.from_pretrained(BASE, drafter=drafter, dtype="float64", speculation=speculation)
        found = engine.generate(PROBLEMS[:5], samples=1, max_tokens=48, seed=3)
        tokens.append([response.token_ids for response in found])
        if drafter is not None:
            assert engine.stats.accept_length > 2, "a drafter that knows the model"
    assert tokens[1] == tokens[0]
    solved = [TASK.score(BY_ID[response.problem_id], response.text)["solved"] for response in found]
    assert len(solved) / 3 < sum(solved) < len(solved)


def update(engine_dtype: torch.dtype, replays: bool, max_tokens: int = 32) -> UpdateMetrics:
    """Of the update in float32."""
    model = load_model(BASE, engine_dtype)
    assert isinstance(model.config, AnyConfig)
    trees = [Strategy.parse(text, "ngram") for text in ("4x1x4", "off")]
    target, routes = AnyTarget(model.config, engine_dtype), "all" if replays else "first"
    engine = RolloutEngine(target, max_batch_size=16, tuner=Switching(trees, seed=1), routes=routes)
    engine.load_policy(model.tensors)
    params = SamplingParams(max_tokens=max_tokens, stop_ids=model.stop_ids, seed=1)
    prompts = {name: tuple(model.tokenizer.encode_text(p["prompt"])) for name, p in BY_ID.items()}
    requests = [Request(name, s, prompt, params) for name, prompt in prompts.items() for s in range(2)]
    rollouts = list(engine.generate(requests))
    rewards = [Reward(float(r.sample_index), True) for r in rollouts]
    policy = AnyTransformer(model.config)
    policy.load_state_dict({name: model.tensors[name].float() for name in policy.state_dict()})
    sampling = SamplingSection(temperature=1.0, max_tokens=max_tokens)
    gradients = gradients_of(policy, None)
    trainer = PolicyTrainer(policy, AlgorithmSection(), OPTIMIZER, sampling, 10, gradients)
    return trainer.update(rollouts, rewards, 0)


def test_engine_and_update_route_alike_in_float32_and_every_expert_has_work() -> None:
    metrics = update(torch.float32, replays=False)
    assert metrics.router_gap == 0
    assert metrics.engine_trainer_logprob_gap < 1e-5
    assert metrics.router_load_entropy > 0.9


@pytest.mark.slow
def test_replay_of_routes_brings_an_engine_in_bfloat16_nearer_to_the_update() -> None:
    without, replayed = (update(torch.bfloat16, replays, max_tokens=64) for replays in (False, True))
    assert without.router_gap > 0
    assert replayed.engine_trainer_logprob_gap < without.engine_trainer_logprob_gap
    assert replayed.engine_trainer_logprob_gap_max < without.engine_trainer_logprob_gap_max
