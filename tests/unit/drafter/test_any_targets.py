"""Drafters of targets that transformers' own files compute: heads that scale and cap, embeddings that the target
multiplies, experts, windows, sinks."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import tokens_of
from tests.unit.models.compared import make_engine, make_requests
from tests.unit.models.families import VOCAB, reference
from tlt.base.strategy import Strategy
from tlt.base.types import Rollout, id_of
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.measure import engine_logits, read_sample, trainer_logits
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import BlockOptions, Method, drafter_shape
from tlt.drafter.training.batch import DrafterBatch
from tlt.drafter.training.buffer import PackedBatch
from tlt.drafter.training.losses import DEFAULT_PRESET, PRESETS
from tlt.drafter.training.offline import OfflineSettings, train_offline
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig
from tlt.models.target import Target
from tlt.speculation.tuner.tuner import FixedTuner

TARGETS = ("granite-3.3-8b", "gemma-2-2b", "gemma-3-1b", "Qwen3-30B-A3B", "gpt-oss-20b")
METHODS: tuple[Method, ...] = ("eagle", "eagle3", "dflash", "dspark")
TOKENS = torch.randint(4, VOCAB, (50,), generator=torch.Generator().manual_seed(3))
SOME = torch.arange(5, VOCAB, 3)


def target_of(name: str) -> Target:
    return make_engine(name, torch.float64).target


def make_model(config: ModelConfig, method: Method) -> DraftModel:
    options = BlockOptions(1, 4, mask_token_id=3)
    return new_model(drafter_shape(config, method, block=options)).double().initialize(0)


def batch_of(target: Target, method: Method, token_ids: Tensor | None) -> DrafterBatch:
    """What the loss is given for a text of the target."""
    trainer = DrafterTrainer(make_model(target.config, method), target, PRESETS[DEFAULT_PRESET[method]])
    trainer.token_ids = token_ids
    attend = PackedCausal(target.config, [len(TOKENS)])
    _, captured_NF = target.forward_capturing(TOKENS, attend.positions(), attend, trainer.capture)
    given: Any = SimpleNamespace(loss=lambda model, batch: batch)
    trainer.preset = given
    batch: Any = trainer.loss(PackedBatch(TOKENS, captured_NF, (50,), torch.ones(49)))
    assert isinstance(batch, DrafterBatch)
    return batch


@pytest.mark.parametrize("token_ids", [None, SOME], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_is_trained_on_the_distribution_that_transformers_gives(
    name: str, method: Method, token_ids: Tensor | None
) -> None:
    batch = batch_of(target_of(name), method, token_ids)
    with torch.no_grad():
        logits_NV = reference(name)(TOKENS[None], use_cache=False).logits[0].double()
    wanted_NV = (logits_NV if token_ids is None else logits_NV[:, token_ids]).softmax(-1)
    torch.testing.assert_close(batch.target_probs(batch.feature_NE), wanted_NV, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TARGETS)
def test_engine_and_trainer_give_a_token_the_same_logit_in_every_draft_vocabulary(
    name: str, method: Method
) -> None:
    target = target_of(name)
    model = make_model(target.config, method)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    rollout = Rollout("p", 0, tuple(TOKENS[:9].tolist()), tuple(TOKENS[9:].tolist()), (0.0,) * 41, "stop", 0)
    with torch.no_grad():
        sample = read_sample([rollout], {0: 41}, target, model.config.capture, 1.0)
        hidden_RE = model.predict(sample, sample.anchors, target.embed)
        wanted_RV = target.logits(model.norm(hidden_RE) if model.config.has_norm else hidden_RE)
        whole = engine_logits(packed, target, sample), trainer_logits(model, target, sample)
        packed.choose(SOME)
        part = engine_logits(packed, target, sample), trainer_logits(model, target, sample, SOME)
    for found_RV in whole:
        torch.testing.assert_close(found_RV, wanted_RV, rtol=0, atol=1e-9)
    for found_RV in part:
        torch.testing.assert_close(found_RV, wanted_RV[:, SOME], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_reads_rows_of_the_embedding_as_they_are_stored(name: str) -> None:
    rows_VE = reference(name).get_input_embeddings().weight
    assert torch.equal(target_of(name).embed(TOKENS), rows_VE[TOKENS])


@pytest.mark.parametrize(
    ("name", "method"),
    cases(
        product(["granite-3.3-8b", "gemma-3-1b", "Qwen3-30B-A3B", "gpt-oss-20b"], METHODS),
        usual=[("gemma-3-1b", "eagle"), ("gemma-3-1b", "dspark")],
    ),
)
def test_a_drafter_learns_any_target_and_changes_none_of_its_tokens(name: str, method: Method) -> None:
    requests = make_requests()[::2]
    off = tokens_of(make_engine(name, torch.float64), requests)
    target = target_of(name)
    model = make_model(target.config, method)

    def accept_length() -> float:
        engine = make_engine(name, torch.float64)
        engine.tuner = FixedTuner(Strategy.parse("learned:4x1x4"))
        packed = pack_drafter(model.config, model.state_dict(), torch.float64)
        engine.load_drafter(LearnedDrafter(packed, engine.target, 4))
        assert tokens_of(engine, requests) == off
        assert engine.stats.accept_length is not None
        return engine.stats.accept_length

    rollouts = [
        Rollout(one.problem_id, 0, one.prompt_ids, off[id_of(one)], (0.0,) * 40, "length", 0)
        for one in requests
    ]
    preset, losses = PRESETS[DEFAULT_PRESET[method]], list[float]()
    settings = OfflineSettings(epochs=40, learning_rate=1e-2, tokens_per_step=200, seed=0)
    before = accept_length()
    train_offline(
        model, target, preset, rollouts, settings, lambda _, loss: losses.extend([loss] if loss else [])
    )
    assert sum(losses[-5:]) < sum(losses[:5])
    assert accept_length() > before + 0.09
