"""Published configurations of many families, shrunk with all their flags, and transformers as the referee."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.cases import cases

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
FURTHER = Path(__file__).parents[1] / "published_configs"
EVERY = PUBLISHED | {path.stem: json.loads(path.read_text()) for path in sorted(FURTHER.glob("*.json"))}
"""More of the same families."""

VOCAB, LAYERS, WINDOW = 320, 4, 16
USUAL = ("Qwen3-0.6B", "Qwen3-30B-A3B", "gpt-oss-20b", "gemma-2-2b", "gemma-4-E2B", "LFM2-1.2B")


def families(names: Iterable[str], usual: Sequence[str] = USUAL) -> list[Any]:
    """A test's parameters: `make test` takes the usual ones, `make proofs` the others, too."""
    return cases(names, usual)


def shrunk(name: str) -> dict[str, Any]:
    """Every ratio that decides a code path is kept: grouped heads, head size, kinds of layers, experts."""
    raw = json.loads(json.dumps(EVERY[name]))
    heads = raw["num_attention_heads"]
    group = heads // (raw.get("num_key_value_heads") or heads)
    usual_head = raw["hidden_size"] // heads
    raw["num_attention_heads"], raw["num_key_value_heads"] = 4, 4 // min(group, 4)
    if raw.get("head_dim"):
        raw["head_dim"] = 16 if raw["head_dim"] == usual_head else 32
    if raw.get("query_pre_attn_scalar"):
        raw["query_pre_attn_scalar"] = 24
    raw |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    raw |= {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if raw.get("sliding_window"):
        raw["sliding_window"] = WINDOW
    for key, size in (("layer_types", LAYERS), ("no_rope_layers", LAYERS)):
        if isinstance(raw.get(key), list):
            raw[key] = (raw[key] * size)[:size]
    if isinstance(raw.get("sliding_window_pattern"), int):
        raw["sliding_window_pattern"] = 2
    for factors in ("long_factor", "short_factor"):
        if factors in (raw.get("rope_scaling") or {}):
            raw["rope_scaling"][factors] = [1.0] * 6
    raw.pop("quantization_config", None)  # of gpt-oss: its weights in bfloat16 have none
    for rope in (raw.get("rope_scaling"), raw.get("rope_parameters")):
        if rope and "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = 64
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raw |= {key: 8, "moe_intermediate_size": 32}
    for key in ("num_experts_per_tok", "experts_per_token", "top_k_experts"):
        if raw.get(key):
            raw[key] = min(raw[key], 2)
    shrink = {"gemma4_text": _shrunk_gemma4, "lfm2": _shrunk_lfm2}.get(raw["model_type"], dict)
    return shrink(raw | {key: size for key, size in SIZES.items() if raw.get(key)})


SIZES: dict[str, Any] = {
    "intermediate_size_mlp": 128,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Of Llama 4, and of Qwen's hybrids."""


def _shrunk_gemma4(raw: dict[str, Any]) -> dict[str, Any]:
    """Half of the layers share keys and values where some do."""
    raw |= {
        "global_head_dim": 2 * raw["head_dim"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    raw |= {
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2 * bool(raw["num_kv_shared_layers"]),
    }
    raw |= {"num_global_key_value_heads": 1 if raw["num_global_key_value_heads"] else None}
    return raw | {"hidden_size_per_layer_input": 8 * bool(raw["hidden_size_per_layer_input"])}


def _shrunk_lfm2(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), 64) | {
        "block_ff_dim": 96, "block_multiple_of": 16, "full_attn_idxs": [2],
    }  # fmt: skip


def precision(name: str) -> float:
    """In float64, of log-probabilities: transformers rounds to float32 in these families."""
    return 1e-6 if EVERY[name]["model_type"] in ("gemma2", "glm4_moe", "gpt_oss", "llama4_text") else 1e-9


@cache
def reference(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """transformers' model with an attention of its own: SDPA, or eager where soft caps and sinks need it, which
    rounds weights to float32. Sharp enough that tokens are certain and uncertain."""
    raw = shrunk(name)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    kind = "eager" if raw["model_type"] in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=kind, experts_implementation="eager"
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
    """[N, V], one full forward without a cache."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)
