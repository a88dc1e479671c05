"""config.json of block drafters, in the three forms that their trainers write. We write the first two, with
our keys beside theirs.

    z-lab        DFlashDraftModel    block_size, dflash_config {mask_token_id, target_layer_ids}
    DeepSpec     Qwen3DSparkModel    the same at the top level, and markov_rank, enable_confidence_head, …
    speculators  speculators_model_type dflash or dspark: aux_hidden_state_layer_ids, sample_from_anchor, …,
                 and the layers' geometry under transformer_layer_config

A target_layer_id counts the *outputs* of layers. Output i is the input of layer i + 1, and `capture` counts
inputs, as speculators' ids do. Whether a block drafts from its anchor on makes the form: `dspark` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tlt.drafter.shape import BlockShape, Method
from tlt.hf.config import config_to_hf, parse_config
from tlt.models.decoder import ModelConfig
from tlt.speculative.strategy import Strategy
from tlt.types import UserError

BLOCK_ARCHITECTURE: Mapping[Method, str] = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
"""The architecture in config.json by the drafter's form."""

MOST_SLOTS = Strategy.MAX_DEPTH + 1
"""Slots of the longest block: the anchor, and as many tokens as any strategy drafts."""

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
    "logit_scale": (1,),
    "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla",),
}
"""Keys that change what a block drafter computes, and their values that we compute; null is one of them."""


def block_to_hf(config: BlockShape, dtype: torch.dtype, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json of a block drafter. about: facts about its origin."""
    described = config_to_hf(config.layer, dtype, {"tlt": dict(about)})
    described |= {
        "architectures": [BLOCK_ARCHITECTURE[config.method]],
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.layer.num_layers,
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
    }
    ids = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.capture],
    }
    if config.method == "dflash":
        return described | {"dflash_config": ids}
    return described | ids | _heads(config) | {"num_anchors": 512}  # DeepSpec asks for its training's


def block_to_speculators(config: BlockShape, dtype: torch.dtype, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns speculators' config.json of a block drafter, but for `speculators_config`."""
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
        # vLLM reads false as a causal block, in layers without a sliding window, too
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
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.has_confidence and config.markov_rank > 0,
    }


def block_from_hf(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> BlockShape:
    """Returns the shape in a config.json of any of the three forms. UserError for what it lacks, what does
    not fit the target, and what we would compute otherwise. path: named in errors."""
    described = _merged(raw)
    _refuse_other_computations(path, described)
    flat = {**described, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    layer = parse_config(flat, f"drafter {path}")
    layer = dataclasses.replace(layer, tie_embeddings=True, max_positions=target.max_positions)

    def number(name: str, given: Any, least: int, most: int) -> int:
        if type(given) is not int or not least <= given <= most:
            remedy = f"it must be a number from {least} to {most}"
            raise UserError(f"drafter {path}: {name} is {given!r}; {remedy}")
        return given

    size, num_layers = described.get("draft_vocab_size"), described.get("num_target_layers")
    if num_layers not in (None, target.num_layers):
        raise UserError(
            f"drafter {path}: num_target_layers is {num_layers!r}, this model has {target.num_layers}; give "
            "the model it was trained for"
        )
    name = "aux_hidden_state_layer_ids" if _is_speculators(described) else "target_layer_ids"
    shift, ids = int(name == "target_layer_ids"), described.get(name)
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(i) is not int for i in ids)
        or ids != sorted(set(ids))
    ):
        raise UserError(f"drafter {path}: {name} is {ids!r}; it must name layers, rising")
    capture = tuple(number(name, i, -shift, target.num_layers - shift) + shift for i in ids)
    shape = BlockShape(
        block_method(described),
        layer,
        capture,
        layer.vocab_size if size is None else number("draft_vocab_size", size, 1, layer.vocab_size),
        block_size=number("block_size", described.get("block_size"), 2, MOST_SLOTS),
        mask_token_id=number("mask_token_id", described.get("mask_token_id"), 0, layer.vocab_size - 1),
        num_target_layers=target.num_layers,
    )
    rank = number("markov_rank", described.get("markov_rank") or 0, 0, 2**20)
    has_confidence = bool(described.get("enable_confidence_head"))
    if shape.method == "dflash":
        if rank or has_confidence:
            raise UserError(
                f"drafter {path}: sample_from_anchor is {described.get('sample_from_anchor')}, with which a "
                "Markov or confidence head is not computed here; use a drafter trained with true"
            )
        return shape
    if has_confidence and bool(described.get("confidence_head_with_markov")) != (rank > 0):
        remedy = "the confidence head must read the Markov head's states, where there is one"
        raise UserError(f"drafter {path}: confidence_head_with_markov is not {rank > 0}; {remedy}")
    return dataclasses.replace(shape, markov_rank=rank, has_confidence=has_confidence)


def block_method(raw: Mapping[str, Any]) -> Method:
    """Returns the form of the block drafter in a config.json. DeepSpec's says nothing of its anchor, from
    which it drafts; speculators' drafts from its anchor only where it says so, as vLLM reads it."""
    described = _merged(raw)
    is_deepspec = "Qwen3DSparkModel" in (raw.get("architectures") or ()) and not _is_speculators(raw)
    drafts = described.get("sample_from_anchor", is_deepspec and not described.get("dspark_bonus_anchor"))
    return "dspark" if drafts else "dflash"


def _is_speculators(described: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in described


def _merged(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys at the top level. Of a key in two places the engines read the one in dflash_config."""
    return {**(raw.get("transformer_layer_config") or {}), **raw, **(raw.get("dflash_config") or {})}


def _refuse_other_computations(path: Path, described: Mapping[str, Any]) -> None:
    wrong = [
        (name, described[name])
        for name, computed in _COMPUTED.items()
        if described.get(name) is not None and described[name] not in computed
    ]
    others = set(described.get("layer_types") or ()) - {"full_attention"}
    wrong += [("layer_types", one) for one in sorted(others)]
    for name, value in wrong[:1]:
        raise UserError(
            f"drafter {path}: {name} is {value!r}, which is not computed here; use a drafter trained without "
            "it"
        )
