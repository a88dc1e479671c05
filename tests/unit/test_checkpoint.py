"""Checkpoints: what we read is what transformers reads, what we write transformers loads, and the rest is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tlt import files
from tlt.models import hf_weights as checkpoint
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, RopeScaling, Transformer
from tlt.models.hf_config import config_to_hf, load_model_config, parse_config
from tlt.models.hf_weights import content_hash, expected_shapes, load_tensors, plan_shards, save_model
from tlt.types import UserError

PUBLISHED = Path(__file__).parent / "published_configs"

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 777.0}, head_dim=12),
    "llama-rope3-tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def theirs(case: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(CASES[case]).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small qwen2 checkpoint as transformers writes it."""
    theirs("qwen2").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """None removes a tensor."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors")


def refusal(action: Any, *arguments: Any, **named: Any) -> str:
    """The message, which must be one line."""
    with pytest.raises(UserError) as caught:
        action(*arguments, **named)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@torch.no_grad()
def logits(config: ModelConfig, tensors: Mapping[str, Tensor], token_ids: list[int]) -> Tensor:
    model = Transformer(config)
    model.load_state_dict(tensors)
    attend = PackedCausal(config, [len(token_ids)])
    return model.logits(model(torch.tensor(token_ids), attend.positions(), attend))


# ── configurations ───────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_llama_3_3_is_read_with_its_rope_scaling() -> None:
    config = load_published("Llama-3.3-70B-Instruct")
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        max_positions=131072,
        tie_embeddings=False,
    )


def load_published(name: str) -> ModelConfig:
    return parse_config(json.loads((PUBLISHED / f"{name}.json").read_text()), name)


def test_the_layouts_of_transformers_4_and_5_mean_the_same() -> None:
    old = json.loads((PUBLISHED / "Llama-3.3-70B-Instruct.json").read_text())
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    assert parse_config(new, "new") == parse_config(old, "old")
    older = old | {"rope_scaling": {key.replace("rope_type", "type"): value for key, value in old["rope_scaling"].items()}}
    assert parse_config(older, "older") == parse_config(old, "old")
    assert parse_config(old | {"rope_scaling": None}, "plain").rope_scaling is None
    plain = {**new, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert (parse_config(plain, "plain").rope_theta, parse_config(plain, "plain").rope_scaling) == (5.0, None)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    shape = {key: SIZES[key] for key in SIZES if key.endswith("_size") or key in ("num_hidden_layers", "num_attention_heads")}
    raw = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **shape}
    config, expected = parse_config(raw, "minimal"), LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
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


REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2.5-7B", {"num_experts": 60}, "num_experts is 60;"),
    ("Qwen2.5-7B", {"architectures": ["Qwen2MoeForCausalLM"]}, "architectures is ['Qwen2MoeForCausalLM'];"),
    ("Llama-3.3-70B-Instruct", {"num_local_experts": 8}, "num_local_experts is 8;"),
    ("Qwen2.5-7B", {"vision_config": {"depth": 32}}, "vision_config is {'depth': 32};"),
    ("Qwen2.5-7B", {"architectures": ["MistralForCausalLM"]}, "architectures is ['MistralForCausalLM'];"),
    ("Qwen2.5-7B", {"architectures": None}, "architectures is None;"),
    ("Llama-3.3-70B-Instruct", {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures is ['LlamaForCausalLMEagle3'];"),
    ("Llama-3.3-70B-Instruct", {"model_type": "mistral"}, "model_type is 'mistral';"),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}, "sliding_window is 4096;"),
    ("Qwen2.5-7B", {"layer_types": ["full_attention", "sliding_attention"] * 14}, "layer_types is 'sliding_attention';"),
    (
        "Qwen2.5-7B",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 28},
        "layer_types is 'sliding_attention';",
    ),
    ("Qwen2.5-7B", {"layer_types": ["linear_attention"] * 28}, "layer_types is 'linear_attention';"),
    ("Qwen2.5-7B", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is {'quant_method': 'awq'};"),
    ("Llama-3.3-70B-Instruct", {"attention_bias": True}, "attention_bias is True;"),
    ("Qwen3", {"attention_bias": True}, "attention_bias is True;"),
    ("Llama-3.3-70B-Instruct", {"mlp_bias": True}, "mlp_bias is True;"),
    ("Llama-3.3-70B-Instruct", {"hidden_act": "gelu"}, "hidden_act is 'gelu';"),
    ("Llama-3.3-70B-Instruct", {"pretraining_tp": 2}, "pretraining_tp is 2;"),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn';"),
    ("Qwen2.5-7B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear';"),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic';"),
    ("Qwen2.5-7B", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters.rope_type is 'yarn';"),
    ("Qwen2.5-7B", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters is {'full_attention':"),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is None;"),
    ("Qwen2.5-7B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5;"),
    ("Qwen2.5-7B", {"num_key_value_heads": 5}, "num_key_value_heads is 5;"),
    ("Qwen2.5-7B", {"head_dim": 63}, "head_dim is 63;"),
    ("Qwen2.5-7B", {"hidden_size": "3584"}, "hidden_size is '3584';"),
    ("Qwen2.5-7B", {"vocab_size": None}, "vocab_size is None;"),
    ("Qwen3", {"head_dim": None}, "head_dim is None;"),
    ("Qwen2.5-7B", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6';"),
]


@pytest.mark.parametrize(("base", "changes", "named"), REFUSED_CONFIGS, ids=lambda value: str(value)[:40])
def test_what_would_be_computed_differently_is_refused_by_name(base: str, changes: dict[str, Any], named: str) -> None:
    if base == "Qwen3":
        raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
        raw |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    else:
        raw = json.loads((PUBLISHED / f"{base}.json").read_text())
    parse_config(raw, "unchanged")
    message = refusal(parse_config, raw | changes, "DIR/config.json")
    assert message.startswith(f"DIR/config.json: {named}")
    assert len(message.partition("; ")[2]) > 10  # a remedy follows


def test_qwen_without_the_number_of_kv_heads_is_refused() -> None:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
    del raw["num_key_value_heads"]  # transformers would take 32
    assert "num_key_value_heads is None;" in refusal(parse_config, raw, "config.json")


def test_long_values_are_cut_in_messages() -> None:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text()) | {"quantization_config": {"modules": ["x" * 30] * 30}}
    assert len(refusal(parse_config, raw, "config.json")) < 240


def test_a_configuration_survives_the_way_to_transformers_and_back(case: str, tmp_path: Path) -> None:
    theirs(case).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, torch.bfloat16, {"eos_token_id": [7, 8]})))
    assert load_model_config(tmp_path) == config
    read = AutoConfig.from_pretrained(tmp_path)
    for key in SIZES:
        if key not in ("eos_token_id", "attn_implementation"):
            assert getattr(read, key) == SIZES[key], key
    assert read.rope_parameters == CASES[case].rope_parameters
    assert (read.bos_token_id, read.eos_token_id, read.dtype) == (None, [7, 8], torch.bfloat16)


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_shard_size", ["1GB", "9KB"])
def test_what_transformers_saves_we_load(case: str, max_shard_size: str, tmp_path: Path) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (max_shard_size == "9KB")
    config = load_model_config(tmp_path)
    tensors = load_tensors(tmp_path, config)
    parameters = dict(model.named_parameters())
    assert list(tensors) == list(expected_shapes(config))
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameters[name]) for name in tensors)
    token_ids = [5, 9, 60, 0, 33]
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits(config, tensors, token_ids), expected, atol=1e-4, rtol=0)


def test_tensors_come_in_their_stored_dtype_or_the_one_asked_for(saved: Path) -> None:
    edit_tensors(saved, {name: tensor.bfloat16() for name, tensor in load_file(saved / "model.safetensors").items()})
    config = load_model_config(saved)
    assert {tensor.dtype for tensor in load_tensors(saved, config).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_tensors(saved, config, torch.float64).values()} == {torch.float64}


def test_a_stored_copy_of_a_tied_head_and_old_rotary_buffers_are_dropped(tmp_path: Path) -> None:
    theirs("qwen3-tied").save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    before = content_hash(load_tensors(tmp_path, config))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert content_hash(load_tensors(tmp_path, config)) == before
    edit_tensors(tmp_path, {"lm_head.weight": embedding + 1})
    message = refusal(load_tensors, tmp_path, config)
    assert str(tmp_path / "model.safetensors") in message
    assert "lm_head.weight differs" in message
    assert "tie_word_embeddings" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, dtype: torch.dtype, saved: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(saved / "model.safetensors")[name].to(dtype)
    tensor[3, 4] = value
    edit_tensors(saved, {name: tensor})
    message = refusal(load_tensors, saved, load_model_config(saved))
    assert message.startswith(f"{saved / 'model.safetensors'}: tensor {name} holds NaN or infinite values as ")
    assert "download" in message


def test_weights_that_the_wanted_type_cannot_hold_are_refused_by_name(saved: Path) -> None:
    tensor = load_file(saved / "model.safetensors")["model.norm.weight"]
    edit_tensors(saved, {"model.norm.weight": tensor + 1e6})
    config = load_model_config(saved)
    assert load_tensors(saved, config)["model.norm.weight"].max() > 9e5
    assert "model.norm.weight holds NaN or infinite values as float16;" in refusal(load_tensors, saved, config, torch.float16)


REFUSED_TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"model.layers.1.self_attn.k_proj.bias": None}, "tensor model.layers.1.self_attn.k_proj.bias is missing;"),
    ({"lm_head.weight": None, "model.norm.weight": None}, "tensor model.norm.weight (and 1 more) is missing;"),
    ({"model.layers.2.input_layernorm.weight": torch.ones(32)}, "tensor model.layers.2.input_layernorm.weight is unknown;"),
    ({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, "tensor a (and 2 more) is unknown;"),
    ({"model.norm.weight": torch.ones(33)}, "tensor model.norm.weight has shape [33]; config.json asks for [32];"),
    ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "tensor model.norm.weight has dtype I8;"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED_TENSORS, ids=lambda value: str(value)[:50])
def test_other_tensors_than_the_expected_are_refused_by_name(
    changes: dict[str, Tensor | None], named: str, saved: Path
) -> None:
    edit_tensors(saved, changes)
    message = refusal(load_tensors, saved, load_model_config(saved))
    assert message.startswith(f"{saved / 'model.safetensors'}: {named}")
    assert len(message.partition("; ")[2]) > 10


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    theirs("qwen2").save_pretrained(tmp_path, max_shard_size="9KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    assert f"{second}: tensor {name} is also in {first.name};" in refusal(load_tensors, tmp_path, load_model_config(tmp_path))


def test_incomplete_directories_are_refused(tmp_path: Path, saved: Path) -> None:
    config = load_model_config(saved)
    nowhere = tmp_path / "nowhere"
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere}: is no directory;")
    assert refusal(load_tensors, nowhere, config).startswith(f"{nowhere}: is no directory;")
    nowhere.mkdir()
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere / 'config.json'}: is missing;")
    assert "holds neither model.safetensors nor model.safetensors.index.json;" in refusal(load_tensors, nowhere, config)
    (nowhere / "pytorch_model.bin").touch()
    message = refusal(load_tensors, nowhere, config)
    assert "holds pytorch_model.bin but no safetensors; convert it" in message
    assert "save_pretrained" in message
    (nowhere / "config.json").write_text("{")
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere / 'config.json'}: is no JSON")
    (nowhere / "config.json").write_text("[]")
    assert "holds a JSON list" in refusal(load_model_config, nowhere)
    (nowhere / "model.safetensors.index.json").write_text("{}")
    assert "weight_map is missing or empty;" in refusal(load_tensors, nowhere, config)


def test_a_missing_shard_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    theirs("qwen2").save_pretrained(tmp_path, max_shard_size="9KB")
    config = load_model_config(tmp_path)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-1])
    assert refusal(load_tensors, tmp_path, config).startswith(f"{second}: is no readable safetensors file")
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(load_tensors, tmp_path, config)
    first.unlink()
    assert f"index.json: shard {first.name} is missing;" in refusal(load_tensors, tmp_path, config)


# ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 9_000])
def test_what_we_save_transformers_loads(case: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path / "source")
    config = load_model_config(tmp_path / "source")
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    target = tmp_path / "deep" / "target"
    save_model(target, config, tensors, dtype=torch.float32, source=tmp_path / "source", max_shard_bytes=max_shard_bytes)

    assert load_model_config(target) == config
    assert content_hash(load_tensors(target, config)) == content_hash(tensors)
    shards = list(target.glob("*.safetensors"))
    assert (len(shards) > 2) == (max_shard_bytes == 9_000)
    if len(shards) > 1:
        total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in tensors.values())
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers 4 asks for it, 5 no longer does
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    assert loaded.config.eos_token_id == 7
    assert loaded.config.bos_token_id == model.config.bos_token_id
    token_ids = torch.tensor([[5, 9, 60, 0, 33]])
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_a_model_saved_as_bfloat16_loads_as_bfloat16(tmp_path: Path) -> None:
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(0).named_parameters())
    save_model(tmp_path / "target", config, tensors, dtype=torch.bfloat16, source=None, extra={"eos_token_id": 3})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert (model.dtype, model.config.eos_token_id, model.config.bos_token_id) == (torch.bfloat16, 3, None)
    loaded = load_tensors(tmp_path / "target", config)
    assert all(torch.equal(loaded[name], tensors[name].detach().bfloat16()) for name in tensors)


def load_published_small() -> ModelConfig:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
    return parse_config(raw | {key: value for key, value in SIZES.items() if key != "attn_implementation"}, "small")


def test_the_files_of_the_tokenizer_come_along_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    companions = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"]
    for name in (*companions, "README.md", "pytorch_model.bin", "optimizer.pt"):
        (saved / name).write_text(name)
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tool.jinja").write_text("tool")
    save_small(tmp_path / "target", source=saved)
    written = {str(file.relative_to(tmp_path / "target")) for file in (tmp_path / "target").rglob("*") if file.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors", "additional_chat_templates/tool.jinja"}
    assert written == {*companions, *own}
    assert (tmp_path / "target" / "merges.txt").read_text() == "merges.txt"


def test_a_tokenizer_loads_from_what_we_saved(saved: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", chat_template="{{ messages }}").save_pretrained(saved)
    save_small(tmp_path / "target", source=saved)
    copied = PreTrainedTokenizerFast.from_pretrained(tmp_path / "target")
    assert copied("b")["input_ids"] == [1]
    assert copied.chat_template == "{{ messages }}"


def save_small(target: Path, source: Path | None = None, seed: int = 0) -> str:
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(seed).named_parameters())
    save_model(target, config, tensors, dtype=torch.float32, source=source, extra=None if source else {"eos_token_id": 3})
    return content_hash(tensors)


def hash_of(path: Path) -> str:
    return content_hash(load_tensors(path, load_model_config(path)))


def test_an_existing_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_small(target, seed=1)
    (target / "tokenizer.json").write_text("of the old one")
    second = save_small(target, seed=2)
    assert hash_of(target) == second
    assert not (target / "tokenizer.json").exists()
    assert os.listdir(tmp_path) == ["target"]


def test_a_checkpoint_can_be_saved_over_its_own_source(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("kept")
    expected = save_small(saved, source=saved)
    assert hash_of(saved) == expected
    assert (saved / "tokenizer.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("module", "step"),
    [(checkpoint, "_write_tensors"), (checkpoint, "write_json"), (checkpoint, "_copy_companions"), (files, "flush")],
)
def test_a_save_that_dies_leaves_the_old_checkpoint(
    module: ModuleType, step: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_of(saved)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, step, die)
        with pytest.raises(KeyboardInterrupt):
            save_small(saved, source=saved)
    assert hash_of(saved) == before
    assert save_small(saved, source=saved) == hash_of(saved)
    assert os.listdir(saved.parent) == ["saved"]


def test_every_file_of_a_checkpoint_is_flushed_before_the_rename(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tool.jinja").write_text("tool")
    flushed: set[str] = set()
    monkeypatch.setattr(files, "flush", lambda path: flushed.add(path.name))
    save_small(saved, source=saved)
    assert flushed >= {file.name for file in saved.rglob("*")}


def test_a_save_that_dies_between_its_two_renames_can_be_repaired(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = hash_of(saved), Path.rename

    def rename_once(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_once)
        with pytest.raises(KeyboardInterrupt):
            save_small(saved)
    old = saved.with_name(".saved.old")
    assert refusal(load_model_config, saved).endswith(f"rename {old} to saved")
    assert hash_of(old) == before
    assert save_small(saved) == hash_of(saved)
    assert os.listdir(saved.parent) == ["saved"]


def test_a_directory_with_other_files_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    (saved / "thesis.tex").write_text("years")
    message = refusal(save_small, saved)
    assert message.startswith(f"{saved}: holds thesis.tex, which is no part of a checkpoint;")
    assert (saved / "thesis.tex").read_text() == "years"
    (tmp_path / "file").touch()
    assert refusal(save_small, tmp_path / "file").startswith(f"{tmp_path / 'file'}: is a file;")
    (tmp_path / "empty").mkdir()
    assert save_small(tmp_path / "empty") == hash_of(tmp_path / "empty")


def test_saving_other_tensors_than_the_configuration_has_is_a_bug_of_ours(tmp_path: Path) -> None:
    config = load_published_small()
    tensors = dict(Transformer(config).named_parameters())
    for wrong in ({"model.norm.weight": None}, {"more": torch.ones(1)}, {"model.norm.weight": torch.ones(3)}):
        given = {name: tensor for name, tensor in (tensors | wrong).items() if tensor is not None}
        with pytest.raises(AssertionError):
            save_model(tmp_path / "target", config, given, dtype=torch.float32, source=None)
    assert not (tmp_path / "target").exists()


def test_shards_are_filled_in_order_and_never_beyond_their_bound() -> None:
    shapes = {name: torch.Size([size]) for name, size in zip("abcdef", (3, 3, 10, 1, 2, 3), strict=True)}
    assert plan_shards(shapes, 2, 12) == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert plan_shards(shapes, 2, 11) == [["a"], ["b"], ["c"], ["d", "e"], ["f"]]
    assert plan_shards(shapes, 2, 1000) == [list("abcdef")]


# ── identity ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_content_hash_sees_names_dtypes_shapes_and_bytes_but_no_order() -> None:
    base = {"a": torch.arange(6.0), "b": torch.tensor(1.0), "c": torch.zeros(2, dtype=torch.bfloat16)}
    same = [
        dict(reversed(base.items())),
        base | {"a": torch.arange(12.0)[::2] / 2},
        base | {"a": torch.arange(6.0).requires_grad_()},
    ]
    others = [
        {"a": base["a"]},
        base | {"d": torch.zeros(0)},
        {"a2" if name == "a" else name: tensor for name, tensor in base.items()},
        base | {"a": base["a"].reshape(2, 3)},
        base | {"a": base["a"].double()},
        base | {"a": base["a"].view(torch.int32)},
        base | {"c": -base["c"]},
        base | {"a": base["a"].flip(0)},
    ]
    assert {content_hash(tensors) for tensors in same} == {content_hash(base)}
    assert len({content_hash(tensors) for tensors in [base, *others]}) == len(others) + 1


def test_the_content_hash_of_a_policy_never_changes_its_meaning() -> None:
    assert content_hash({"w": torch.tensor([1.0, 2.0])}) == ("6dbfbed9dee3dbde593832616eda8879e9f9a924278893c8acb2ea5be161194a")


def test_a_checkpoint_moved_elsewhere_is_the_same(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    assert hash_of(tmp_path / "copy") == hash_of(saved)
