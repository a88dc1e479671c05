"""Rollouts beside somebody else's trainer: transformers' own module is trained here by hand, and is the
reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tlt.base.spans import SpanName
from tlt.base.types import Rollout, SamplingParams, UserError
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.attention import PackedCausal
from tlt.models.hf.module import module_config, module_tensors
from tlt.models.hf.weights import expected_shapes
from tlt.training.live import LiveRollouts, LiveSettings

VOCAB, STOP = 61, 2
PROMPTS = [[1, 5, 6], [1, 5, 6], [1, 9, 17, 4], [1, 5, 6]]
PARAMS = SamplingParams(max_tokens=24, stop_ids=(STOP,), seed=3)


def make_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": VOCAB}
    return (
        LlamaForCausalLM(LlamaConfig(**(shape | ids | {"initializer_range": 0.3} | changes))).double().eval()
    )


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "drafter"
    save_drafter(folder, new_model(drafter_shape(module_config(make_model()))).initialize(1), torch.float32)
    return folder


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.token_ids for rollout in rollouts]


def take_a_step(model: nn.Module) -> None:
    """Trains in place, as an optimizer does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([[1, 5, 6, 7, 8, 9]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def test_greedy_responses_are_those_of_transformers() -> None:
    model = make_model()
    responses = LiveRollouts(model).generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, stop_ids=(STOP,)), 0
    )
    for prompt, response in zip(PROMPTS, responses, strict=True):
        known = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :]
        assert list(response.token_ids) == known.tolist()
        assert response.prompt_ids == tuple(prompt)


def test_speculation_changes_no_token(drafter: Path) -> None:
    model = make_model()
    plain = LiveRollouts(model, LiveSettings(speculation="off")).generate(PROMPTS, PARAMS, 4)
    for settings in (
        LiveSettings(drafter, "learned:3x2x6"),
        LiveSettings(None, "3x1x3"),
        LiveSettings(drafter),
    ):
        assert tokens(LiveRollouts(model, settings).generate(PROMPTS, PARAMS, 4)) == tokens(plain), settings


def test_a_prompt_that_comes_again_gets_another_response_and_a_new_loop_gets_the_same_ones() -> None:
    model = make_model()
    rollouts = LiveRollouts(model)
    first, second = rollouts.generate(PROMPTS, PARAMS, 4), rollouts.generate(PROMPTS, PARAMS, 4)
    assert len(set(tokens(first + second))) == 2 * len(PROMPTS)
    assert tokens(LiveRollouts(model).generate(PROMPTS + PROMPTS, PARAMS, 4)) == tokens(first + second)
    assert not set(tokens(first)) & set(tokens(rollouts.generate(PROMPTS, PARAMS, 5)))


def test_an_evaluation_has_keys_of_its_own_and_can_be_repeated() -> None:
    rollouts = LiveRollouts(make_model())
    trained = rollouts.generate(PROMPTS, PARAMS, 4)
    first = rollouts.generate(PROMPTS, PARAMS, 4, "evaluation")
    assert not set(tokens(trained)) & set(tokens(first))
    assert not set(tokens(first)) & set(tokens(rollouts.generate(PROMPTS, PARAMS, 4, "evaluation")))
    rollouts.restart("evaluation")
    assert tokens(rollouts.generate(PROMPTS, PARAMS, 4, "evaluation")) == tokens(first)
    assert not set(tokens(trained)) & set(tokens(rollouts.generate(PROMPTS, PARAMS, 4))), (
        "the step's own counts went on"
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_call_uses_the_weights_of_that_moment(dtype: str) -> None:
    model = make_model()
    rollouts = LiveRollouts(model, LiveSettings(dtype=dtype))
    for step in range(3):
        rollouts.generate(PROMPTS[:1], PARAMS, step)
        packed, ids = rollouts.engine.target, torch.tensor([1, 5, 6, 9])
        with torch.no_grad():
            attend = PackedCausal(packed.config, [4])
            found = packed.logits(packed.forward(ids, attend.positions(), attend)).double()
            distance = (found - model(ids[None]).logits[0]).norm() / found.norm()
        assert (
            distance < {"float64": 1e-6, "float32": 1e-5, "bfloat16": 0.05}[dtype]
        )  # transformers rotates in float32
        assert packed.version == step
        take_a_step(model)


def test_nothing_is_ever_written_into_the_trainers_weights() -> None:
    model, other = make_model(), make_model(1).float()
    before = copy.deepcopy(model.state_dict())
    engine = LiveRollouts(model).engine
    engine.load_policy(
        module_tensors(other, expected_shapes(engine.config)), 1
    )  # of another type: it cannot be borrowed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(engine.target.embedding_VE, other.model.embed_tokens.weight.double())


def test_a_single_rank_trains_the_drafter_for_a_share_of_its_time_and_can_save_it(
    drafter: Path, tmp_path: Path
) -> None:
    model, drafting = make_model(), {"learning_rate": 1e-2}
    rollouts = LiveRollouts(model, LiveSettings(drafter, "learned:3x1x3", drafting=drafting, idle_share=1.0))
    rollouts.generate(PROMPTS, PARAMS, 0)
    assert rollouts.latest is not None
    assert rollouts.latest.check is not None
    assert rollouts.latest.check.training.startswith("trained")
    assert rollouts.seconds[SpanName.TRAIN_DRAFTER] > 0
    rollouts.generate(PROMPTS, PARAMS, 0, "evaluation")
    assert rollouts.latest.check is None
    rollouts.save_drafter(tmp_path / "kept")
    assert tokens(LiveRollouts(model, LiveSettings(tmp_path / "kept")).generate(PROMPTS, PARAMS, 1))
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() != (
        drafter / "model.safetensors"
    ).read_bytes()


def test_a_call_that_was_broken_off_can_be_made_again(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    rollouts = LiveRollouts(model, LiveSettings(drafter, max_batch_size=2))
    expected = rollouts.generate(PROMPTS, PARAMS, 0)
    step, num_steps = rollouts.engine.step, 0

    def interrupted(captures: bool = False) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        return step(captures)

    monkeypatch.setattr(rollouts.engine, "step", interrupted)
    rollouts.restart("rollout")
    with pytest.raises(KeyboardInterrupt):
        rollouts.generate(PROMPTS, PARAMS, 0)
    rollouts.restart("rollout")
    assert tokens(rollouts.generate(PROMPTS, PARAMS, 0)) == tokens(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LiveSettings("nowhere"), "drafter: nowhere does not exist"),
        (lambda: LiveSettings(speculation="fast"), "speculation: 'fast' is no strategy"),
        (lambda: LiveSettings(drafting={"learning_rat": 1}), "did you mean"),
        (lambda: LiveSettings(max_batch_size=0), "max_batch_size: is 0"),
        (lambda: LiveSettings(idle_share=2.0), "idle_share: is 2.0"),
        (lambda: LiveRollouts(nn.Linear(2, 2)), "model: is a Linear"),
        (lambda: LiveRollouts(make_model(hidden_act="gelu")), "hidden_act is 'gelu'"),
        (lambda: LiveRollouts(make_model().half()), "dtype: 'float16' is unknown"),
        (
            lambda: LiveRollouts(make_model()).generate([[1, VOCAB]], PARAMS, 0),
            "prompt 1 of rank 0: token id 61",
        ),
        (
            lambda: LiveRollouts(make_model()).generate([[1], [1] * 128], PARAMS, 0),
            "prompt 2 of rank 0: .* 128 tokens",
        ),
    ],
)
def test_a_mistake_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_adapters_and_shards_are_refused() -> None:
    model = make_model()
    config, expected = module_config(model), expected_shapes(module_config(model))
    assert module_tensors(model, expected).keys() == expected.keys()
    with pytest.raises(
        UserError, match=r"parameter model.embed_tokens.weight of a ModuleDict is missing; .* adapters merged"
    ):
        module_tensors(nn.ModuleDict({"base_model": model}), expected)
    model.model.norm.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(
        UserError, match=r"parameter model.norm.weight is \[0\] where the whole \[32\] is wanted"
    ):
        module_tensors(model, expected)
    assert config.vocab_size == VOCAB
