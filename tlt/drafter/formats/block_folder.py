"""config.json of block drafters: z-lab's form, which vLLM and SGLang read, with our keys beside theirs.

    DFlashDraftModel     block_size, dflash_config {mask_token_id, target_layer_ids}
    Qwen3DSparkModel     the same, with markov_rank, enable_confidence_head, confidence_head_with_markov

A target_layer_id counts the *outputs* of layers. Output i is the input of layer i + 1, and `capture` counts
inputs.
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
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [index - 1 for index in config.capture],
        },
    }
    if config.method == "dspark":
        described["markov_rank"] = config.markov_rank
        described["enable_confidence_head"] = config.has_confidence
        described["confidence_head_with_markov"] = config.has_confidence and config.markov_rank > 0
    return described


def block_from_hf(path: Path, described: Mapping[str, Any], target: ModelConfig) -> BlockShape:
    """Returns the shape in a config.json, under whose key "method" stands the form. UserError for what it
    lacks, and what does not fit the target. path: named in errors."""
    flat = {**described, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    layer = parse_config(flat, f"drafter {path}")
    layer = dataclasses.replace(layer, tie_embeddings=True, max_positions=target.max_positions)
    nested = described.get("dflash_config") or {}

    def number(name: str, given: Any, least: int, most: int) -> int:
        if type(given) is not int or not least <= given <= most:
            remedy = f"it must be a number from {least} to {most}"
            raise UserError(f"drafter {path}: {name} is {given!r}; {remedy}")
        return given

    size = described.get("draft_vocab_size")
    mask = nested.get("mask_token_id", described.get("mask_token_id"))
    ids = nested.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or ids != sorted(set(ids)):
        raise UserError(
            f"drafter {path}: dflash_config.target_layer_ids is {ids!r}; it must name layers, rising"
        )
    capture = tuple(number("target_layer_ids", i, 0, target.num_layers - 1) + 1 for i in ids)
    shape = BlockShape(
        described["method"],
        layer,
        capture,
        layer.vocab_size if size is None else number("draft_vocab_size", size, 1, layer.vocab_size),
        block_size=number("block_size", described.get("block_size"), 2, MOST_SLOTS),
        mask_token_id=number("mask_token_id", mask, 0, layer.vocab_size - 1),
        num_target_layers=target.num_layers,
    )
    if shape.method == "dflash":
        return shape
    rank = number("markov_rank", described.get("markov_rank", 0), 0, 2**20)
    has_confidence = bool(described.get("enable_confidence_head"))
    if has_confidence and bool(described.get("confidence_head_with_markov")) != (rank > 0):
        remedy = "the confidence head must read the Markov head's states, where there is one"
        raise UserError(f"drafter {path}: confidence_head_with_markov is not {rank > 0}; {remedy}")
    return dataclasses.replace(shape, markov_rank=rank, has_confidence=has_confidence)
