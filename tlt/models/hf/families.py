"""config.json → AnyConfig, for the decoders that were compared with transformers' own attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.base.config.engine import Implementation
from tlt.base.io.text import one_line
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.hf.config import Fields, OtherComputation, parse_config
from tlt.models.hf.files import existing_directory, read_json
from tlt.models.hf.text_part import text_part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DENSE = "apertus ernie4_5 exaone4 gemma2 gemma3_text gemma4_text glm4 granite hunyuan_v1_dense llama"
DENSE += " ministral3 mistral olmo2 olmo3 phi3 qwen2 qwen3 seed_oss smollm3"
EXPERTS = "glm4_moe gpt_oss llama4_text mixtral olmoe qwen3_moe"
HYBRIDS = frozenset(("lfm2", "qwen3_5_text", "qwen3_next"))
CHECKED = HYBRIDS | {*DENSE.split(), *EXPERTS.split()}
"""model_type of each; tests/unit/models/test_any.py compares them."""

MOST_EXPERTS = 256
"""Routes are kept as bytes."""

MIN_WINDOW = 16
"""A window is longer than a draft tree is deep."""


def load_model_config(path: Path | str, implementation: Implementation = "auto") -> ModelConfig:
    """Raises UserError for mistakes, OtherComputation for models that are not computed here.

    implementation: own: decoder.py; transformers: any.py; auto: decoder.py where it can.
    """
    source = existing_directory(path) / "config.json"
    raw = read_json(source)
    try:
        if (text := text_part(Fields(raw, str(source)))) is not None:
            return replace(_parse(text, str(source), implementation), is_text_part=True)
        return _parse(raw, str(source), implementation)
    except OtherComputation as refusal:
        remedy = "engine vllm may generate with it, but cannot train it"
        remedy = "implementation auto may compute it" if implementation == "own" else remedy
        raise OtherComputation(f"{refusal}; {remedy}") from None


def _parse(raw: Mapping[str, Any], source: str, implementation: Implementation) -> ModelConfig:
    if implementation == "own":
        return parse_config(raw, source)
    if implementation == "auto":
        with suppress(OtherComputation):
            return parse_config(raw, source)
    return parse_any(raw, source)


def parse_any(raw: Mapping[str, Any], source: str) -> AnyConfig:
    """Raises UserError and OtherComputation."""
    fields = Fields(raw, source)
    _refuse_unknown(fields)
    config = _read(fields)
    known, max_positions = {"full_attention", "sliding_attention"}, config.max_position_embeddings
    if config.model_type in HYBRIDS:
        known |= {"conv", "linear_attention"}
    if config.model_type == "llama4_text":
        known, max_positions = known | {"chunked_attention"}, min(max_positions, _within_a_chunk(config))
    if kinds := set(getattr(config, "layer_types", None) or []) - known:
        raise fields.other("layer_types", f"{min(kinds)} is no attention that can be computed here")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise fields.other("use_bidirectional_attention", "a token must see earlier tokens alone")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < MIN_WINDOW:
        raise fields.other("sliding_window", f"a window has at least {MIN_WINDOW} tokens")
    _refuse_ropes(fields, config)
    _refuse_activations(fields, config)
    num_heads, scaling = config.num_attention_heads, getattr(config, "logits_scaling", None)
    shapes = [_shape_of_heads(layer) for layer in config.per_layer_config]
    num_kv_heads, head_dim = map(max, zip(*shapes, strict=True))
    if any(num_kv_heads % number for number, _ in shapes):
        raise fields.other("num_global_key_value_heads", "it must divide num_key_value_heads")
    return AnyConfig(
        architecture="transformers",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_active_width(config),
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        tie_embeddings=bool(config.tie_word_embeddings),
        rope_theta=_theta(config),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        raw=json.dumps(dict(raw), sort_keys=True),
        layer_windows=_windows(config),
        head_scale=1.0 if scaling is None else 1.0 / scaling,
        head_softcap=getattr(config, "final_logit_softcapping", None),
        num_experts=_num_experts(fields, config),
        experts_per_token=_experts_per_token(config),
        mixes_heads=len(set(shapes)) > 1,
        is_hybrid=config.model_type in HYBRIDS,
    )


def _theta(config: PreTrainedConfig) -> float:
    """That of whole attention, which new drafters take."""
    ropes = config.rope_parameters or {}
    theta: float = ropes.get("full_attention", ropes).get("rope_theta", 10_000.0)
    return theta


def _within_a_chunk(config: PreTrainedConfig) -> int:
    """Llama 4: tokens of a first chunk see all earlier ones, at temperature 1."""
    chunk: int = config.attention_chunk_size or config.max_position_embeddings
    return min(chunk, int(config.floor_scale) - 1) if config.attn_temperature_tuning else chunk


def _shape_of_heads(layer: PreTrainedConfig) -> tuple[int, int]:
    num_heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    return getattr(layer, "num_key_value_heads", None) or num_heads, head_dim


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Without kinds of layers, a window is every layer's."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds) if window else ()


def _active_width(config: PreTrainedConfig) -> int:
    width: int = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    routed = width * (_experts_per_token(config) or 1)
    match config.model_type:
        case "lfm2" if config.block_auto_adjust_ff_dim:
            multiple: int = config.block_multiple_of
            return -(-int(config.block_ffn_dim_multiplier * int(2 * width / 3)) // multiple) * multiple
        case "llama4_text":
            beside: int = config.intermediate_size_mlp  # of layers without experts
            return max(routed + width, beside)
        case "gemma4_text":
            dense: int = config.intermediate_size * (1 + config.use_double_wide_mlp)
            return dense + (routed if config.enable_moe_block else 0)
    return routed


def _experts_per_token(config: PreTrainedConfig) -> int:
    """In transformers' Llama 4 all experts compute a token, of which most read zeros."""
    names = (
        ("num_local_experts",)
        if config.model_type == "llama4_text"
        else ("num_experts_per_tok", "top_k_experts")
    )
    number: int = next((found for name in names if (found := getattr(config, name, None))), 0)
    return number


def _num_experts(fields: Fields, config: PreTrainedConfig) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number: int = next((found for name in names if (found := getattr(config, name, None))), 0)
    if number > MOST_EXPERTS and config.model_type not in HYBRIDS:  # whose engine tells no routes
        name = next(name for name in names if name in fields.raw)
        raise fields.other(name, f"routes are kept for {MOST_EXPERTS} experts of a layer at most")
    return number


def _refuse_unknown(fields: Fields) -> None:
    raw, family = fields.raw, fields.text("model_type")
    if raw.get("quantization_config") is not None:
        remedy = "quantized weights cannot be trained, use the unquantized checkpoint"
        raise fields.other("quantization_config", remedy)
    if family not in CHECKED:
        known = "it was not compared with transformers; known are"
        raise fields.other("model_type", f"{known} {', '.join(sorted(CHECKED))}")


def _read(fields: Fields) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    try:
        config: PreTrainedConfig = CONFIG_MAPPING[fields.raw["model_type"]].from_dict(dict(fields.raw))
    except Exception as error:  # transformers refuses by exceptions of many kinds
        raise fields.refusal("model_type", f"transformers cannot read it ({one_line(error, 160)})") from None
    return config


def _refuse_activations(fields: Fields, config: PreTrainedConfig) -> None:
    from transformers.activations import ACT2FN

    for name in ("hidden_act", "hidden_activation"):
        given = getattr(config, name, None)
        if given is not None and given not in ACT2FN:
            raise fields.other(name, "transformers has no such activation")


def _refuse_ropes(fields: Fields, config: PreTrainedConfig) -> None:
    """Frequencies that depend on a batch's longest text would let one response change another."""
    ropes = config.rope_parameters or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or (kind == "dynamic" and not rope.get("alpha")):
            named = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
            remedy = f"{kind} positions depend on the longest text of a batch, so they cannot be batched"
            raise fields.other(named, remedy)
