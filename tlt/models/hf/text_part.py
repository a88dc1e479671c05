"""The text part of a checkpoint that also reads images.

    config.json  {vision_config, text_config, …}   ─▶ the text model's own
    model.language_model.layers.0.…  lm_head.…     ─▶ model.layers.0.…  lm_head.…    others are carried along

With text alone, Qwen's three position ids of a token are equal: the text parts are Qwen2 and Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tlt.base.io.text import one_line
from tlt.models.hf.config import ARCHITECTURES, Fields

COMPOSITE = ("gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")
"""model_type of each; tests/unit/models/test_text_part.py compares them."""
_COMPUTED_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}

Layout = tuple[str, str]
"""Prefixes of the decoder's names and of the head's."""
MODULE: Layout = ("model.", "lm_head.")
NEWEST: Layout = ("model.language_model.", "lm_head.")
NESTED: Layout = ("language_model.model.", "language_model.lm_head.")
_LAYOUTS: tuple[Layout, ...] = (NESTED, NEWEST, MODULE)


def text_part(fields: Fields) -> dict[str, Any] | None:
    """Returns the text part's config.json, or None for a text model and for an unknown one."""
    from transformers import CONFIG_MAPPING

    if (family := fields.text("model_type")) not in COMPOSITE:
        return None
    try:
        whole = CONFIG_MAPPING[family].from_dict(dict(fields.raw))
        text: dict[str, Any] = json.loads(whole.get_text_config().to_json_string(use_diff=False))
    except Exception as error:  # transformers refuses by exceptions of many kinds
        raise fields.refusal("model_type", f"transformers cannot read it ({one_line(error, 160)})") from None
    kind = _COMPUTED_AS.get(text["model_type"], text["model_type"])
    names = [name for name, architecture in ARCHITECTURES.items() if architecture == kind]
    if kind != text["model_type"]:
        rope = {
            key: value for key, value in (text.get("rope_parameters") or {}).items() if "mrope" not in key
        }
        text |= {"model_type": kind, "rope_parameters": rope}
    text.pop("rope_scaling", None)  # rope_parameters hold it
    text["architectures"] = names
    text["tie_word_embeddings"] = bool(whole.tie_word_embeddings)
    return text | {"quantization_config": fields.raw.get("quantization_config")}


def layout_of(stored: Iterable[str]) -> Layout:
    names = list(stored)
    found = (one for one in _LAYOUTS if any(name.startswith(f"{one[0]}layers.") for name in names))
    return next(found, NEWEST)


def renamed(name: str, was: Layout, now: Layout) -> str | None:
    """None: no name of the text part."""
    found = (b + name.removeprefix(a) for a, b in zip(was, now, strict=True) if name.startswith(a))
    return next(found, None)


def in_layout(tensors: Mapping[str, Tensor], layout: Layout, was: Layout = MODULE) -> dict[str, Tensor]:
    named = {renamed(name, was, layout): tensor for name, tensor in tensors.items()}
    assert None not in named, "all are of the text part"
    return {str(name): tensor for name, tensor in named.items()}
