"""Checkpoints of transformers' own tiny models, and how the tests of checkpoints read, edit and compare
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.unit.models.transformer_parts import LLAMA3, draw_weights, plain
from tests.unit.models.transformer_parts import SIZES as sizes
from tlt.base.types import UserError
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import parse_config
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import content_hash, load_tensors, save_model

PUBLISHED = Path(__file__).parents[2] / "published_configs"

SIZES: dict[str, Any] = sizes | {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}
LLAMA3_SHORT = LLAMA3 | {"original_max_position_embeddings": 32}
CASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters=plain(777.0), head_dim=12),
    "llama-rope3-tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3_SHORT, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=plain(1e6)),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def theirs(case: str) -> PreTrainedModel:
    return draw_weights(AutoModelForCausalLM.from_config(CASES[case]).eval(), seed=5)


def edit_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """None removes a tensor."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        directory / "model.safetensors",
    )


def refusal(action: Any, *arguments: Any, **named: Any) -> str:
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


def load_published(name: str) -> ModelConfig:
    return parse_config(json.loads((PUBLISHED / f"{name}.json").read_text()), name)


def load_published_small() -> ModelConfig:
    raw = json.loads((PUBLISHED / "Qwen2.5-7B.json").read_text())
    return parse_config(
        raw | {key: value for key, value in SIZES.items() if key != "attn_implementation"}, "small"
    )


def save_small(target: Path, source: Path | None = None, seed: int = 0) -> str:
    config = load_published_small()
    tensors = dict(Transformer(config).initialize(seed).named_parameters())
    save_model(
        target,
        config,
        tensors,
        dtype=torch.float32,
        source=source,
        extra=None if source else {"eos_token_id": 3},
    )
    return content_hash(tensors)


def hash_of(path: Path) -> str:
    return content_hash(load_tensors(path, load_model_config(path)))
