"""config.json: what transformers computes is read as it reads it, and the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.unit.models.hf.checkpoint_parts import CASES, PUBLISHED, SIZES, refusal, theirs
from tlt.models.hf.config import config_to_hf, parse_config
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import expected_shapes


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen2.5-7B", 7_615_616_512),
        ("DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Llama-3.3-70B-Instruct", 70_553_706_496),
    ],
)
def test_the_published_models_have_the_parameters_of_transformers(name: str, num_parameters: int) -> None:
    raw = json.loads((PUBLISHED / f"{name}.json").read_text())
    config = parse_config(raw, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    shapes = expected_shapes(config)
    assert shapes == {parameter: tensor.shape for parameter, tensor in model.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == num_parameters
    assert config.rope_theta == model.config.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == model.config.rms_norm_eps
    assert config.max_positions == 131072


def test_the_layouts_of_transformers_4_and_5_mean_the_same() -> None:
    old = json.loads((PUBLISHED / "Llama-3.3-70B-Instruct.json").read_text())
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    assert parse_config(new, "new") == parse_config(old, "old")
    older = old | {
        "rope_scaling": {
            key.replace("rope_type", "type"): value for key, value in old["rope_scaling"].items()
        }
    }
    assert parse_config(older, "older") == parse_config(old, "old")
    assert parse_config(old | {"rope_scaling": None}, "plain").rope_scaling is None
    plain = {**new, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert (parse_config(plain, "plain").rope_theta, parse_config(plain, "plain").rope_scaling) == (5.0, None)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    shape = {
        key: SIZES[key]
        for key in SIZES
        if key.endswith("_size") or key in ("num_hidden_layers", "num_attention_heads")
    }
    raw = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **shape}
    config, expected = (
        parse_config(raw, "minimal"),
        LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"}),
    )
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == expected.head_dim
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.rope_theta == expected.rope_parameters["rope_theta"]
    assert config.tie_embeddings == expected.tie_word_embeddings


def test_windows_that_hide_nothing_are_let_through() -> None:
    qwen = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
    harmless: list[dict[str, Any]] = [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 131072, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"use_sliding_window": True, "sliding_window": 131072, "layer_types": ["sliding_attention"] * 28},
        {"layer_types": ["full_attention"] * 28},
    ]
    for changes in harmless:
        assert parse_config(qwen | changes, "harmless") == parse_config(qwen, "published")


QWEN2, LLAMA, QWEN3 = "Qwen2.5-7B", "Llama-3.3-70B-Instruct", "Qwen3"
SLIDING = "layer_types is 'sliding_attention';"
REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (QWEN2, {"num_experts": 60}, ""),
    (QWEN2, {"architectures": ["Qwen2MoeForCausalLM"]}, ""),
    (LLAMA, {"num_local_experts": 8}, ""),
    (QWEN2, {"vision_config": {"depth": 32}}, ""),
    (QWEN2, {"architectures": ["GemmaForCausalLM"]}, ""),
    (QWEN2, {"architectures": None}, ""),
    (LLAMA, {"architectures": ["LlamaForCausalLMEagle3"]}, ""),
    (LLAMA, {"model_type": "mistral"}, ""),
    (QWEN2, {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 14}, ""),
    (QWEN2, {"layer_types": ["full_attention", "sliding_attention"] * 14}, SLIDING),
    (
        QWEN2,
        {"layer_types": ["sliding_attention"] * 28, "use_sliding_window": True, "sliding_window": 9},
        SLIDING,
    ),
    (QWEN2, {"layer_types": ["linear_attention"] * 28}, "layer_types is 'linear_attention';"),
    (QWEN2, {"quantization_config": {"quant_method": "awq"}}, ""),
    (LLAMA, {"attention_bias": True}, ""),
    (QWEN3, {"attention_bias": True}, ""),
    (LLAMA, {"mlp_bias": True}, ""),
    (LLAMA, {"hidden_act": "gelu"}, ""),
    (LLAMA, {"pretraining_tp": 2}, ""),
    (
        QWEN2,
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling.original_max_position_embeddings is None;",
    ),
    (QWEN2, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None;"),
    (QWEN2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic';"),
    (
        QWEN2,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}},
        "rope_parameters.rope_type is 'longrope';",
    ),
    (
        QWEN2,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters is {'full_attention':",
    ),
    (QWEN2, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is None;"),
    (QWEN2, {"partial_rotary_factor": 0.5}, ""),
    (QWEN2, {"num_key_value_heads": 5}, ""),
    (QWEN2, {"head_dim": 63}, ""),
    (QWEN2, {"head_dim": 2**62}, ""),
    (QWEN2, {"head_dim": 2**30, "num_attention_heads": 2**30, "num_key_value_heads": 2**30}, ""),
    (LLAMA, {"head_dim": 2**20, "num_attention_heads": 2**12}, ""),
    (QWEN3, {"hidden_size": 2**63}, ""),
    (QWEN2, {"hidden_size": "3584"}, ""),
    (QWEN2, {"vocab_size": None}, ""),
    (QWEN3, {"head_dim": None}, ""),
    (QWEN2, {"rms_norm_eps": "1e-6"}, ""),
]
"""Changes of a published config.json, and how the refusal begins (empty: "KEY is VALUE" of the first key)."""


@pytest.mark.parametrize(("base", "changes", "named"), REFUSED_CONFIGS, ids=lambda value: str(value)[:40])
def test_what_would_be_computed_differently_is_refused_by_name(
    base: str, changes: dict[str, Any], named: str
) -> None:
    raw = json.loads((PUBLISHED / f"{QWEN2 if base == QWEN3 else base}.json").read_text())
    if base == QWEN3:
        raw |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    parse_config(raw, "unchanged")
    message = refusal(parse_config, raw | changes, "DIR/config.json")
    key, value = next(iter(changes.items()))
    assert message.startswith(f"DIR/config.json: {named or f'{key} is {value!r};'}")
    assert len(message.partition("; ")[2]) > 10  # a remedy follows


def test_qwen_without_the_number_of_kv_heads_is_refused() -> None:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
    del raw["num_key_value_heads"]  # transformers would take 32
    assert "num_key_value_heads is None;" in refusal(parse_config, raw, "config.json")


def test_long_values_are_cut_in_messages() -> None:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text()) | {
        "quantization_config": {"modules": ["x" * 30] * 30}
    }
    assert len(refusal(parse_config, raw, "config.json")) < 240


def test_a_configuration_survives_the_way_to_transformers_and_back(case: str, tmp_path: Path) -> None:
    theirs(case).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config_to_hf(config, torch.bfloat16, {"eos_token_id": [7, 8]}))
    )
    assert load_model_config(tmp_path) == config
    read = AutoConfig.from_pretrained(tmp_path)
    for key in SIZES:
        if key not in ("eos_token_id", "attn_implementation"):
            assert getattr(read, key) == SIZES[key], key
    assert read.rope_parameters == CASES[case].rope_parameters
    assert (read.bos_token_id, read.eos_token_id, read.dtype) == (None, [7, 8], torch.bfloat16)
