"""A published configuration beside transformers, in figures: for the proofs, and for benchmarks/families.py."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from tests.unit.models import compared
from tests.unit.models.families import EVERY
from tests.unit.models.test_any import own_config
from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.hf.config import OtherComputation
from tlt.models.hf.families import parse_any
from tlt.models.hf.weights import count_parameters


def published(name: str) -> AnyConfig:
    """The configuration in its own size. Lists by layer are kept in short, as their pattern."""
    raw = dict(EVERY[name])
    num_layers = raw["num_hidden_layers"]
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(raw.get(key), list):
            raw[key] = (raw[key] * num_layers)[:num_layers]
    if raw["model_type"] == "gpt_oss":
        raw.pop("quantization_config")  # its weights in bfloat16 have none
    return parse_any(raw, name)


def kinds_of_attention(config: AnyConfig, raw: Mapping[str, Any]) -> str:
    windows = [window for window in config.windows if window is not None]
    if config.is_hybrid:
        num = parse_layers(raw).count("full_attention")
        return ", ".join([f"full in {num} of {config.num_layers} layers", *_experts(config)])
    said = f"{len(windows)} of {config.num_layers} layers see {windows[0]:,} tokens" if windows else "full"
    caps = (
        [f"scores capped at {raw['attn_logit_softcapping']:g}"] if raw.get("attn_logit_softcapping") else []
    )
    sinks = ["sinks"] if raw["model_type"] == "gpt_oss" else []
    return ", ".join([said, *caps, *sinks, *_experts(config)])


def _experts(config: AnyConfig) -> list[str]:
    return [f"{config.num_experts} experts"] if config.num_experts else []


def parse_layers(raw: Mapping[str, Any]) -> list[str]:
    kinds: list[str] = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw)).layer_types
    return kinds


def measure(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "model_type": EVERY[name]["model_type"]}
    try:
        config = published(name)
    except (OtherComputation, UserError) as refusal:
        return {**found, "refused": str(refusal)}
    began = time.perf_counter()
    found["attention"] = kinds_of_attention(config, EVERY[name])
    found["parameters"] = count_parameters(config)
    found["own"] = own_config(name) is not None
    for dtype in (torch.float64, torch.float32):
        if config.is_hybrid:
            found[str(dtype).removeprefix("torch.")] = {"logprob_gap": compared.logprob_gap(name, dtype)}
            continue
        result = compared.generated(name, dtype)
        key = str(dtype).removeprefix("torch.")
        found[key] = {"logprob_gap": result.logprob_gap, "greedy_gap": result.greedy_gap}
        found[key] |= {"other": result.num_other, "responses": result.num_responses}
    if not config.is_hybrid:
        found["other_by_eagle"] = compared.num_other_by_eagle(name)
    found["gradient_error"] = compared.gradient_error(name)
    found["adapter_gap"] = compared.adapter_gap(name)
    with tempfile.TemporaryDirectory() as folder:
        found["saved_otherwise"] = compared.differing_tensors_when_saved_again(name, Path(folder))
    return {**found, "seconds": time.perf_counter() - began}
