"""A token's numbers are the same to the last bit however it is computed: one token at a time, in a chain, in a
tree, in a prompt, beside others, in a packed batch as the update has it, by one thread or several."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.unit.models.rows import WAYS, by_a_thread, in_steps_of
from tests.unit.models.transformer_parts import target_of
from tlt.models.decoder import ModelConfig

CONFIGS = [
    ModelConfig("llama", 40, 64, 96, 2, 4, 2, 32, max_positions=256),
    ModelConfig("qwen2", 40, 48, 80, 2, 4, 1, 24, max_positions=256),
    ModelConfig("qwen3", 40, 64, 112, 2, 2, 2, 64, max_positions=256),
]


@cache
def one_token_at_a_time(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return by_a_thread(in_steps_of(1), target_of(config, dtype))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
@torch.inference_mode()
def test_a_tokens_numbers_are_its_own(config: ModelConfig, dtype: torch.dtype, way: str) -> None:
    target = target_of(config, dtype)
    alone, found = one_token_at_a_time(config, dtype), WAYS[way](target)
    for expected, ours in zip(alone, found, strict=True):
        assert torch.equal(ours, expected), f"{(ours != expected).sum()} of {ours.numel()} numbers differ"
    expected, ours = (target.logits(features_TE) for features_TE in (alone[0], found[0]))
    assert torch.equal(ours, expected)
