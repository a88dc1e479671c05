"""config.json ↔ ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.models.decoder import Architecture, ModelConfig
from tlt.models.rope import LinearScaling, Llama3, Scaling, Yarn

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SeedOssForCausalLM": "seed_oss",
}

ROPES = {"linear": LinearScaling, "llama3": Llama3, "yarn": Yarn}
"""Stretched positions, by rope_type."""

LARGEST_NUMBER, LARGEST_SIZE, MOST_LAYERS = 1e30, 2**31, 10_000
"""Larger numbers: config.json is damaged."""

NO_USUAL_HEAD = ("qwen3", "seed_oss")
"""Families whose head size is not hidden size / heads where config.json has none."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class OtherComputation(UserError):
    """A model that our decoder would compute differently from transformers; vLLM may take it."""


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Raises UserError and OtherComputation.

    Reads the layouts of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Absent keys have
    transformers' defaults; those whose default depends on the family (kv heads, head size) are required.
    """
    fields = Fields(raw, source)
    architecture = _architecture(fields)
    _refuse_other_computations(fields, architecture)
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size, max_positions = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
    inherits_heads = architecture == "llama" or raw.get("num_key_value_heads", 0) is None
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if inherits_heads else None)
    head_dim = fields.integer("head_dim", None if architecture in NO_USUAL_HEAD else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"it must divide num_attention_heads ({num_heads})")
    if num_heads * head_dim > LARGEST_SIZE:
        remedy = f"with {num_heads} heads, a layer has more than {LARGEST_SIZE:,} columns; correct either"
        raise _refusal(source, "head_dim", head_dim, remedy)
    if head_dim % 2:
        raise _refusal(source, "head_dim", head_dim, "rotary positions need an even head size")
    if architecture == "mistral":
        _refuse_window_of_all_layers(fields, max_positions)
    else:
        _refuse_sliding_windows(fields, num_layers, max_positions)
    rope_theta, rope_scaling = _rope(raw, source)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_positions=max_positions,
        tie_embeddings=fields.flag("tie_word_embeddings"),
    )


def config_to_hf(
    config: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the layout of transformers 4, which 5, vLLM and SGLang read too. Token ids not given are null:
    an absent id would become the family's default (Llama: eos 2)."""
    rope_scaling = None
    if (scaling := config.rope_scaling) is not None:
        (kind,) = (name for name, known in ROPES.items() if isinstance(scaling, known))
        rope_scaling = {"rope_type": kind, **asdict(scaling)}
        if "original_max_positions" in rope_scaling:
            rope_scaling["original_max_position_embeddings"] = rope_scaling.pop("original_max_positions")
    described = {
        "architectures": [name for name, family in ARCHITECTURES.items() if family == config.architecture],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.head_scale != 1.0:  # of a drafter alone: vLLM reads it in drafters
        described["logit_scale"] = config.head_scale
    added = dict.fromkeys(TOKEN_IDS) | dict(extra or {})
    assert not (both := described.keys() & added.keys()), f"extra would override {sorted(both)}"
    return described | added


def _architecture(fields: Fields) -> Architecture:
    raw, supported = fields.raw, f"supported are {', '.join(ARCHITECTURES)}"
    no_experts = f"mixtures of experts are not supported, use a dense model ({supported})"
    names = fields.items("architectures")
    name = names[0] if len(names) == 1 and isinstance(names[0], str) else None
    if raw.get("vision_config") is not None:
        raise fields.other("vision_config", f"vision is not supported, use a text model ({supported})")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise fields.other(key, no_experts)
    if name is not None and "Moe" in name:
        raise fields.other("architectures", no_experts)
    if name not in ARCHITECTURES:
        raise fields.other("architectures", supported)
    family = ARCHITECTURES[name]
    if raw.get("model_type", family) != family:
        raise fields.refusal("model_type", f"{name} goes with {family!r}, correct one of the two")
    return family


def _refuse_other_computations(fields: Fields, architecture: Architecture) -> None:
    raw = fields.raw
    if raw.get("quantization_config") is not None:
        remedy = "quantized weights cannot be trained, use the unquantized checkpoint"
        raise fields.other("quantization_config", remedy)
    if architecture == "seed_oss" and not fields.flag("attention_bias", True):
        raise fields.other("attention_bias", "seed_oss has attention biases here, use a checkpoint with true")
    if architecture not in ("qwen2", "seed_oss") and fields.flag("attention_bias"):
        remedy = f"{architecture} has no attention biases here, use a checkpoint with false"
        raise fields.other("attention_bias", remedy)
    if fields.flag("attention_out_bias"):
        raise fields.other(
            "attention_out_bias", "output biases are not supported, use a checkpoint with false"
        )
    if fields.flag("mlp_bias"):
        raise fields.other("mlp_bias", "MLP biases are not supported, use a checkpoint with false")
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.other("hidden_act", "only 'silu' is supported")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        remedy = "only 1 is supported; set it to 1, the weights are the same up to rounding"
        raise fields.refusal("pretraining_tp", remedy)


def _refuse_window_of_all_layers(fields: Fields, max_positions: int) -> None:
    """Mistral has no switch: an absent window is 4096 tokens, null is none."""
    window = fields.raw.get("sliding_window", 4096)
    if window is not None and fields.integer("sliding_window", 4096) < max_positions:
        raise fields.other("sliding_window", "only full attention is supported")


def _refuse_sliding_windows(fields: Fields, num_layers: int, max_positions: int) -> None:
    """Allows a window that hides nothing. Without layer_types, transformers lets the layers from
    max_window_layers on slide."""
    raw = fields.raw
    is_set = fields.flag("use_sliding_window") and raw.get("sliding_window") is not None
    window = fields.integer("sliding_window") if is_set else None
    remedy = (
        "only full attention is supported; lower max_position_embeddings to the window, or set "
        "use_sliding_window to false"
    )
    hides = window is not None and window < max_positions
    if raw.get("layer_types") is None:
        all_slide = raw.get("max_window_layers") == 0
        if hides and (all_slide or fields.integer("max_window_layers", 28) < num_layers):
            raise fields.other("sliding_window", remedy)
        return
    for layer_type in fields.items("layer_types"):
        if layer_type != "full_attention" and (layer_type != "sliding_attention" or window is None or hides):
            raise _refusal(fields.source, "layer_types", layer_type, remedy, OtherComputation)


def _rope(raw: Mapping[str, Any], source: str) -> tuple[float, Scaling | None]:
    """As in transformers, rope_scaling precedes rope_parameters, and a theta inside precedes one outside."""
    fields = Fields(raw, source)
    named = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    given = fields.table(named)
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.other(named, "one rotary base per layer type is not supported, only one for all layers")
    rope = Fields({"rope_theta": raw.get("rope_theta", 10000.0), **given}, source, prefix=f"{named}.")
    theta = rope.number("rope_theta")
    rope_type = given.get("rope_type", given.get("type", "default"))
    rotated_share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated_share not in (None, 1.0):
        remedy = "only whole heads (1.0) can be rotated"
        raise _refusal(source, "partial_rotary_factor", rotated_share, remedy, OtherComputation)
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, LinearScaling(rope.number("factor"))
    if rope_type == "yarn":
        return theta, _yarn(rope, raw)
    if rope_type != "llama3":
        remedy = f"supported are 'default' (which it is without {named}), {', '.join(map(repr, ROPES))}"
        raise _refusal(source, f"{named}.rope_type", rope_type, remedy, OtherComputation)
    return theta, Llama3(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _yarn(rope: Fields, raw: Mapping[str, Any]) -> Yarn:
    original = rope.integer("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    factor = rope.number("factor")
    given = None if rope.raw.get("attention_factor") is None else rope.number("attention_factor")
    if given is None and rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        parts = [
            0.1 * rope.number(key) * math.log(max(factor, 1.0)) + 1 for key in ("mscale", "mscale_all_dim")
        ]
        given = parts[0] / parts[1]
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return Yarn(factor, original, beta_fast, beta_slow, given, rope.flag("truncate", True))


@dataclass(frozen=True)
class Fields:
    """A JSON object, read with type checks; null counts as absent. prefix: the keys above it."""

    raw: Mapping[str, Any]
    source: str
    prefix: str = ""

    def refusal(self, name: str, remedy: str) -> UserError:
        return _refusal(self.source, self.prefix + name, self.raw.get(name), remedy)

    def other(self, name: str, remedy: str) -> UserError:
        return _refusal(self.source, self.prefix + name, self.raw.get(name), remedy, OtherComputation)

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST_NUMBER:
            raise self.refusal(name, "it must be a positive number")
        return float(value)

    def integer(self, name: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
        value = default if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            bound = f" of at most {most:,}" if isinstance(value, int) and value > most else ""
            raise self.refusal(name, f"it must be a positive integer{bound}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = default if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, bool):
            raise self.refusal(name, "it must be true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.raw.get(name)
        if not isinstance(value, str | None):
            raise self.refusal(name, "it must be a text")
        return value

    def layers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        ids = self.items(name)
        is_sound = all(type(index) is int and least <= index <= most for index in ids)
        if not is_sound or ids != sorted(set(ids)):
            raise self.refusal(name, f"it must name layers from {least} to {most}, rising")
        return tuple(ids)

    def items(self, name: str) -> list[Any]:
        value = [] if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, list):
            raise self.refusal(name, "it must be a list")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        value = {} if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, Mapping):
            raise self.refusal(name, "it must be an object")
        return value

    def within(self, name: str) -> Fields:
        return Fields(self.table(name), self.source, f"{self.prefix}{name}.")


def _refusal(source: str, name: str, value: Any, remedy: str, kind: type[UserError] = UserError) -> UserError:
    return kind(f"{source}: {name} is {shorten(value)}; {remedy}")
