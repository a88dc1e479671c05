"""Text parts of checkpoints that also read images, against transformers' whole model; what reads images stays as
it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.lossless.helpers import ArtificialDrafter, Switching, by_id
from tests.refused import refused
from tests.unit.models.compared import TREES, make_requests
from tests.unit.models.families import VOCAB, families
from tests.unit.models.test_lora import make_config, trained
from tlt.base.config.schema import Config
from tlt.engine.build.model import load_model
from tlt.engine.own.engine import RolloutEngine
from tlt.models.any_config import AnyConfig
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Policy
from tlt.models.hf.families import Implementation, load_model_config
from tlt.models.hf.peft import save_adapter
from tlt.models.hf.text_part import COMPOSITE
from tlt.models.hf.weights import load_tensors, read_safetensors, save_model
from tlt.models.new import new_target, new_transformer
from tlt.training.build.policy import build_policy, policy_on_meta
from tlt.training.ranks.sharding import FullTensors

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL = {"model_type": "pixtral", **SMALL, "head_dim": 16, "image_size": 28, "patch_size": 14}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
VISION_OF_QWEN = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32}

WHOLE: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3",
        "text_config": {
            **TEXT,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 24,
        },
        "vision_config": {**SMALL, "image_size": 28, "patch_size": 14},
    },
    "Gemma 4": {
        "model_type": "gemma4",
        "text_config": {
            **TEXT,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
        },
        "vision_config": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
    },
    "Llama 4": {
        "model_type": "llama4",
        "text_config": {
            **TEXT,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
        "vision_config": {**SMALL, "image_size": 28, "patch_size": 14},
    },
    "Ministral 3": {
        "model_type": "mistral3",
        "text_config": {**TEXT, "model_type": "ministral3", "sliding_window": None, "rope_parameters": YARN},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "Mistral Small 3.1": {
        "model_type": "mistral3",
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "Qwen2-VL": {
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, "rope_parameters": MROPE, "use_sliding_window": False},
        "vision_config": {**VISION_OF_QWEN, "hidden_size": 64, "patch_size": 14},
        "tie_word_embeddings": True,
    },
    "Qwen2.5-VL": {
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "rope_parameters": MROPE, "use_sliding_window": False},
        "vision_config": {**VISION_OF_QWEN, "out_hidden_size": 64, "patch_size": 14},
        "tie_word_embeddings": False,
    },
    "Qwen3.5": {
        "model_type": "qwen3_5",
        "text_config": {
            **TEXT,
            "rope_parameters": {
                **MROPE,
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": {**VISION_OF_QWEN, "out_hidden_size": 64},
        "tie_word_embeddings": False,
    },
    "Qwen3-VL": {
        "model_type": "qwen3_vl",
        "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": {**VISION_OF_QWEN, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
    },
}
OWN = ("Mistral Small 3.1", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL")


@cache
def reference(name: str) -> PreTrainedModel:
    raw = json.loads(json.dumps(WHOLE[name]))
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.4 if "embed" in path else 1.2 * parameter.shape[-1] ** -0.5))
            elif "norm" in path:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    if model.config.model_type == "llama4":
        model = (
            model.language_model
        )  # which the whole model calls; without an image its own output fails (5.24)
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


@torch.no_grad()
def updates(config: ModelConfig, tensors: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """What the update computes of one sequence."""
    policy, attend = new_transformer(config, torch.float64), PackedCausal(config, [len(tokens)])
    policy.load_state_dict({path: tensor.double() for path, tensor in tensors.items()})
    return policy.logits(policy(torch.tensor(tokens), attend.positions(), attend)).log_softmax(-1)


@pytest.fixture(scope="module", params=families(WHOLE, usual=["Gemma 3", "Qwen3.5"]))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    reference(request.param).save_pretrained(folder)
    return request.param, folder


def test_all_families_are_compared() -> None:
    assert {raw["model_type"] for raw in WHOLE.values()} == {*COMPOSITE}


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_the_text_part_generates_what_the_whole_model_computes(
    saved: tuple[str, Path], implementation: Implementation
) -> None:
    name, folder = saved
    config = load_model_config(folder, implementation)
    assert config.is_text_part
    is_own = not isinstance(config, AnyConfig)
    assert is_own == (implementation == "auto" and name in OWN)
    tensors = load_tensors(folder, config)
    if config.is_hybrid:
        tokens = list(range(4, 40))
        assert torch.allclose(
            updates(config, tensors, tokens), logprobs(reference(name), tokens), rtol=0, atol=1e-9
        )
        return
    target = new_target(config, torch.float64)
    target.load(tensors, 0)
    engine = RolloutEngine(target, max_batch_size=4, tuner=Switching(TREES, seed=1))
    off = by_id(engine.generate(make_requests()))
    engine.load_drafter(ArtificialDrafter("oracle", answers={key: r.token_ids for key, r in off.items()}))
    for rollout in engine.generate(make_requests()):
        assert rollout.token_ids == off[rollout.problem_id, rollout.sample_index].token_ids
        tokens_T = torch.tensor(rollout.token_ids)[:, None]
        wanted_TV = logprobs(reference(name), [*rollout.prompt_ids, *rollout.token_ids])
        wanted_T = wanted_TV[len(rollout.prompt_ids) - 1 : -1].gather(1, tokens_T)[:, 0]
        found_T = torch.tensor(rollout.logprobs, dtype=torch.float64)
        assert torch.allclose(found_T, wanted_T, rtol=0, atol=1e-4 if is_own else 1e-9)  # float32 positions


def test_what_reads_images_is_saved_as_it_was(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    config = load_model_config(folder)
    changed = {path: 1.5 * tensor for path, tensor in load_tensors(folder, config).items()}
    save_model(tmp_path / "new", config, changed, dtype=torch.float32, source=folder, max_shard_bytes=50_000)
    assert load_model_config(tmp_path / "new") == config
    was, now = read_safetensors(folder), read_safetensors(tmp_path / "new")
    assert was.keys() == now.keys()
    for path, tensor in now.items():
        is_text = (
            "language_model" in path or "lm_head" in path or path.startswith(("model.layers", "model.norm"))
        )
        is_text |= path == "model.embed_tokens.weight"
        assert torch.equal(tensor, (1.5 * was[path]).float() if is_text else was[path]), path
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "new", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = list(range(4, 40))
    found_TV, wanted_TV = updates(config, changed, tokens), logprobs(again.double().eval(), tokens)
    chosen_T1 = wanted_TV.argmax(-1, keepdim=True)
    assert torch.allclose(found_TV.gather(1, chosen_T1), wanted_TV.gather(1, chosen_T1), rtol=0, atol=1e-3)


def test_other_layouts_of_names_are_read_and_kept(tmp_path: Path) -> None:
    """transformers 4 wrote language_model.model.…; Qwen2.5-VL's text had no prefix."""
    for name, prefixes in (
        ("Gemma 3", ("language_model.model.", "vision_tower.")),
        ("Qwen2.5-VL", ("model.", "visual.")),
    ):
        folder = tmp_path / name
        reference(name).save_pretrained(folder)
        config = load_model_config(folder)
        wanted, stored = load_tensors(folder, config), read_safetensors(folder)
        for text in ("model.language_model.", "language_model.model.", "model."):
            if any(path.startswith(f"{text}layers.") for path in stored):
                break
        old = {}
        for path, tensor in stored.items():
            is_text = path.startswith(text) and "vis" not in path.split(".")[1]
            old[prefixes[0] + path.removeprefix(text) if is_text else path.removeprefix("model.")] = tensor
        for file in folder.glob("model*"):
            file.unlink()
        save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
        found = load_tensors(folder, config)
        assert all(torch.equal(found[path], wanted[path]) for path in wanted)
        save_model(tmp_path / "new", config, found, dtype=torch.float64, source=folder)
        assert read_safetensors(tmp_path / "new").keys() == old.keys()


def test_text_parts_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for model_type in ("gemma3n", "lfm2_vl", "qwen3_5_moe"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))
        with refused(rf"config\.json: model_type is '{model_type}'; it was not compared with transformers"):
            load_model_config(tmp_path)
    quantized = WHOLE["Ministral 3"] | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with refused("quantization_config is .*; quantized weights cannot be trained"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_an_adapter_of_the_text_part_is_saved_by_the_whole_model_s_names(
    saved: tuple[str, Path], implementation: Implementation, tmp_path: Path
) -> None:
    name, folder = saved
    policy, config = adapted_policy(folder, implementation)
    save_adapter(tmp_path, policy.config, config.lora, trained(policy), str(folder), None)
    names = {name.partition(".layers.")[0] for name in load_file(tmp_path / "adapter_model.safetensors")}
    own = "language_model.model" if name == "Llama 4" else "model.language_model"
    assert names == {f"base_model.model.{own}"}
    found = load_model(folder, None, tmp_path, implementation).tensors
    for path, tensor in FullTensors(policy).items():
        assert torch.allclose(found[path], tensor, atol=1e-6), path  # adapters are read in float32


def adapted_policy(folder: Path, implementation: Implementation) -> tuple[Policy, Config]:
    """Of all matrices, whose adapters do something."""
    config, model = make_config(), load_model(folder, None, None, implementation)
    policy = build_policy(policy_on_meta(config, model.config), model, torch.device("cpu"), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in policy.named_parameters():
            if ".lora_B." in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy, config
