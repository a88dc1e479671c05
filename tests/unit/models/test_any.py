"""Any decoder: engine and update against transformers' own model, for published configurations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.lossless.helpers import ArtificialDrafter, Switching, by_id
from tests.refused import refused
from tests.unit.models.families import PUBLISHED, VOCAB, logprobs, reference, shrunk
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.engine.own.engine import RolloutEngine
from tlt.models.any import AnyTarget, AnyTransformer
from tlt.models.any_config import AnyConfig
from tlt.models.attention import SharedPrompts
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import OtherComputation, config_to_hf, parse_config
from tlt.models.hf.families import CHECKED, load_model_config, parse_any
from tlt.models.hf.weights import StoredTensors, read_safetensors, save_model

COMPUTED = [name for name, raw in PUBLISHED.items() if raw["model_type"] in CHECKED and name != "Phi-4-mini"]
REFUSED = [name for name in PUBLISHED if name not in COMPUTED]

TREES = [Strategy.parse(text, "artificial") for text in ("4x1x4", "4x3x10", "off")]


def config_of(name: str) -> AnyConfig:
    return parse_any(shrunk(name), "config.json")


def make_engine(name: str, dtype: torch.dtype) -> RolloutEngine:
    target = AnyTarget(config_of(name), dtype)
    engine = RolloutEngine(target, max_batch_size=4, tuner=Switching(TREES, seed=1))
    stored = reference(name, dtype).state_dict()
    engine.load_policy({path: stored[path] for path in target.model.state_dict()})
    return engine


def make_requests() -> list[Request]:
    """Positions beyond a window (16) and the original positions of a stretched rope (64)."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(4, VOCAB) for _ in range(length)) for length in (3, 21, 70)]
    params = (SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(max_tokens=40))
    return [Request(f"p{i}", s, prompts[i], params[s]) for i in range(3) for s in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", COMPUTED)
def test_trees_and_off_generate_what_transformers_computes(name: str, dtype: torch.dtype) -> None:
    engine, model = make_engine(name, dtype), reference(name)
    off = by_id(make_engine(name, dtype).generate(make_requests()))
    engine.load_drafter(ArtificialDrafter("oracle", answers={k: r.token_ids for k, r in off.items()}))
    tolerance = (
        1e-4 if dtype == torch.float32 else 1e-9 if model.config._attn_implementation == "sdpa" else 1e-6
    )
    for rollout in engine.generate(make_requests()):
        wanted_TV = logprobs(model, [*rollout.prompt_ids, *rollout.token_ids])[
            len(rollout.prompt_ids) - 1 : -1
        ]
        found_T, tokens_T = (
            torch.tensor(rollout.logprobs, dtype=torch.float64),
            torch.tensor(rollout.token_ids),
        )
        assert torch.allclose(found_T, wanted_TV.gather(1, tokens_T[:, None])[:, 0], rtol=0, atol=tolerance)
        if rollout.sample_index == 0:
            assert (wanted_TV.max(1).values - wanted_TV.gather(1, tokens_T[:, None])[:, 0]).max() < tolerance
        assert rollout.token_ids == off[rollout.problem_id, rollout.sample_index].token_ids
    assert engine.stats.accept_length > 1.5


def own_config(name: str) -> ModelConfig | None:
    try:
        return parse_config(shrunk(name), "config.json")
    except OtherComputation:
        return None


@pytest.mark.parametrize("name", [name for name in COMPUTED if own_config(name) is not None])
def test_our_own_decoder_computes_what_transformers_does_and_is_saved_as_it_was(name: str) -> None:
    config, model = own_config(name), reference(name)
    assert config is not None
    own = Transformer(config).double()
    own.load_state_dict({path: model.state_dict()[path] for path in own.state_dict()})
    tokens = torch.randint(4, VOCAB, (120,), generator=torch.Generator().manual_seed(0))
    attend = SharedPrompts(config, [(120, [0])])
    with torch.no_grad():
        found_NV = own.logits(own(tokens, attend.positions(), attend)).log_softmax(-1)
    assert torch.allclose(found_NV, logprobs(model, tokens.tolist()), rtol=0, atol=1e-4)  # float32 positions
    assert parse_config(config_to_hf(config, torch.float32), "written") == config


def test_our_own_decoder_is_the_fast_path_of_plain_families() -> None:
    own = {PUBLISHED[name]["model_type"] for name in COMPUTED if own_config(name) is not None}
    assert own == {"llama", "mistral", "qwen2", "qwen3", "seed_oss"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_or_was_not_compared_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(OtherComputation) as refusal:
        config_of(name)
    assert str(refusal.value).startswith("config.json: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemma-3-1b", {"use_bidirectional_attention": True}),
        ("Olmo-3.1-32B", {"layer_types": ["chunked_attention"] * 4}),
        ("Mistral-7B-v0.1", {"sliding_window": 15}),
        ("Hunyuan-7B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}),
    ],
)
def test_a_flag_that_attention_would_have_to_know_is_refused(name: str, changed: dict[str, Any]) -> None:
    with refused(f"config.json: {next(iter(changed))} is "):
        parse_any(shrunk(name) | changed, "config.json")


@pytest.mark.parametrize("name", COMPUTED)
def test_packed_families_have_the_gradients_of_one_sequence_at_a_time(name: str) -> None:
    config, model = config_of(name), reference(name)
    own = AnyTransformer(config, torch.float64, checkpoints_activations=True)
    own.load_state_dict({path: model.state_dict()[path] for path in own.state_dict()})
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, VOCAB, (20,), generator=generator)
    responses = [torch.randint(4, VOCAB, (length,), generator=generator) for length in (30, 50)]
    attend = SharedPrompts(config, [(20, [30, 50])])
    tokens = torch.cat([prompt, *responses])
    features = own(tokens, attend.positions(), attend)
    logprobs_NV = own.logits(features).log_softmax(-1)
    weights = torch.linspace(-1, 1, 100, dtype=torch.float64)
    own_loss = (logprobs_NV.gather(1, tokens.roll(-1)[:, None])[:, 0] * weights)[
        [*range(20, 49), *range(50, 99)]
    ]
    own_loss.sum().backward()
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for response, start in zip(responses, (20, 50), strict=True):
        both = torch.cat([prompt, response])
        found = model(both[None], use_cache=False).logits[0].log_softmax(-1)
        chosen = found[20:-1].gather(1, response[1:, None])[:, 0]
        loss = loss + (chosen * weights[start : start + len(response) - 1]).sum()
    loss.backward()
    wanted = dict(model.named_parameters())
    for path, parameter in own.named_parameters():
        if wanted[path].grad is not None:
            error = (parameter.grad - wanted[path].grad).norm() / wanted[path].grad.norm()
            assert error < 1e-5, (path, error)


@pytest.mark.parametrize("name", ["gemma-3-1b", "Mixtral-8x7B", "GLM-4.5-Air", "gpt-oss-20b", "Apertus-8B"])
def test_a_checkpoint_is_read_and_written_with_transformers_names(name: str, tmp_path: Path) -> None:
    """Experts are fused in a module and single in a file; GLM and Apertus store buffers, too."""
    model = reference(name, torch.float32)
    model.save_pretrained(tmp_path / "given")
    config = load_model_config(tmp_path / "given")
    assert isinstance(config, AnyConfig)
    stored = StoredTensors(tmp_path / "given", config)
    assert all(torch.equal(stored[path], model.state_dict()[path]) for path in stored)
    save_model(tmp_path / "saved", config, stored, dtype=torch.float32, source=tmp_path / "given")
    given, saved = (read_safetensors(tmp_path / folder) for folder in ("given", "saved"))
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[path], saved[path]) for path in given)
    assert load_model_config(tmp_path / "saved") == config


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    reference("Mixtral-8x7B", torch.float32).save_pretrained(tmp_path)
    tensors = read_safetensors(tmp_path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("model.layers.1.block_sparse_moe.experts.0.w1.weight .* config.json asks for"):
        StoredTensors(tmp_path, load_model_config(tmp_path))
