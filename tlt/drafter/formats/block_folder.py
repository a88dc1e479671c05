"""config.json of block drafters. We write the first two forms, with our keys beside theirs.

    z-lab        DFlashDraftModel    block_size, dflash_config {mask_token_id, target_layer_ids}
    DeepSpec     Qwen3DSparkModel    the same at the top level, and markov_rank, …
    speculators  speculators_model_type dflash or dspark: aux_hidden_state_layer_ids, sample_from_anchor, …,
                 and the layers' geometry under transformer_layer_config

A target_layer_id counts layer *outputs*: output i is the input of layer i + 1. `capture` counts inputs, as
speculators' ids do. A block that drafts from its anchor on is `dspark`, any other `dflash`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tlt.base.strategy import Strategy
from tlt.drafter.shape import BlockShape, Method
from tlt.models.decoder import ModelConfig
from tlt.models.hf.config import Fields, config_to_hf, parse_config

BLOCK_ARCHITECTURE: Mapping[Method, str] = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}

MOST_SLOTS = Strategy.MAX_DEPTH + 1

_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "causal": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "shift_label": (False,),
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla",),
}
"""Keys that change a block drafter's computation, and the values (or null) that we compute."""


def block_to_hf(config: BlockShape, dtype: torch.dtype, about: Mapping[str, Any]) -> dict[str, Any]:
    described = config_to_hf(config.layer, dtype, {"tlt": dict(about)})
    described |= {
        "architectures": [BLOCK_ARCHITECTURE[config.method]],
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.layer.num_layers,
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
    }
    ids = {"mask_token_id": config.mask_token_id, "target_layer_ids": [index - 1 for index in config.capture]}
    if config.method == "dflash":
        return described | {"dflash_config": ids}
    return described | ids | _heads(config) | {"num_anchors": 512}  # a training key that DeepSpec requires


def block_to_speculators(config: BlockShape, dtype: torch.dtype, about: Mapping[str, Any]) -> dict[str, Any]:
    layer = config_to_hf(config.layer, dtype) | {
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.layer.num_layers,
    }
    described = {
        "architectures": ["DFlashSpeculator" if config.method == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": config.method,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.capture),
        "sample_from_anchor": config.method == "dspark",
        # false makes vLLM's blocks causal, even in layers without a sliding window
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "tlt": dict(about),
    }
    return described | (_heads(config) if config.method == "dspark" else {})


def _heads(config: BlockShape) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,  # without the key some engines look for its weights
    }


def block_from_hf(given: Fields, target: ModelConfig) -> BlockShape:
    """Raises UserError for missing keys, another target, and computations that we lack."""
    fields = _merged(given)
    _refuse_other_computations(fields)
    flat = {**fields.raw, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    layer = parse_config(flat, fields.source)
    layer = dataclasses.replace(layer, tie_embeddings=True, max_positions=target.max_positions)

    def number(name: str, least: int, most: int, default: int | None = None) -> int:
        value = default if fields.raw.get(name) is None else fields.raw[name]
        if type(value) is not int or not least <= value <= most:
            raise fields.refusal(name, f"it must be a number from {least} to {most}")
        return value

    if fields.integer("num_target_layers", target.num_layers) != target.num_layers:
        remedy = f"this model has {target.num_layers}, give the model it was trained for"
        raise fields.refusal("num_target_layers", remedy)
    name = "aux_hidden_state_layer_ids" if _is_speculators(given) else "target_layer_ids"
    shift = int(name == "target_layer_ids")
    # The last layer's output is a residual sum in vLLM, and behind the final norm in transformers.
    ids = fields.layers(name, -shift, target.num_layers - 1 - shift)
    if not ids:
        raise fields.refusal(name, "it must name layers, rising")
    shape = BlockShape(
        block_method(given),
        layer,
        tuple(index + shift for index in ids),
        number("draft_vocab_size", 1, layer.vocab_size, layer.vocab_size),
        block_size=number("block_size", 2, MOST_SLOTS),
        mask_token_id=number("mask_token_id", 0, layer.vocab_size - 1),
        num_target_layers=target.num_layers,
    )
    rank = number("markov_rank", 0, 2**20, 0)
    if shape.method == "dflash" and rank:
        remedy = (
            "it has a Markov head, which is computed here only in blocks that draft from their anchor; if it "
            "was trained so, set sample_from_anchor to true in config.json"
        )
        raise fields.refusal("sample_from_anchor", remedy)
    return dataclasses.replace(shape, markov_rank=rank)


def block_method(given: Fields) -> Method:
    """DeepSpec's form always drafts from the anchor, speculators' if config.json says so, as in vLLM."""
    fields = _merged(given)
    is_deepspec = "Qwen3DSparkModel" in given.items("architectures") and not _is_speculators(given)
    drafts = fields.flag("sample_from_anchor", is_deepspec and not fields.flag("dspark_bonus_anchor"))
    return "dspark" if drafts else "dflash"


def _is_speculators(given: Fields) -> bool:
    return "speculators_model_type" in given.raw


def _merged(given: Fields) -> Fields:
    """dflash_config wins, as in the engines."""
    raw = {**given.table("transformer_layer_config"), **given.raw, **given.table("dflash_config")}
    return Fields(raw, given.source)


def _refuse_other_computations(fields: Fields) -> None:
    remedy = "it is not computed here, use a drafter trained without it"
    for name, computed in _COMPUTED.items():
        if fields.raw.get(name) is not None and fields.raw[name] not in computed:
            raise fields.refusal(name, remedy)
    if any(one != "full_attention" for one in fields.items("layer_types")):
        raise fields.refusal("layer_types", remedy)
