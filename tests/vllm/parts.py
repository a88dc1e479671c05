"""What the tests of vLLM share: checkpoints, our own engine beside it, and requests of every kind."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.side_by_side import Responses, answers, compare
from tlt.build.engine import EngineSettings, load_engine
from tlt.build.model import load_model
from tlt.config.drafter import DrafterSection
from tlt.config.vllm import VllmSection
from tlt.drafter.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.hf_config import load_model_config
from tlt.types import Request, SamplingParams

BASE, DRAFTER = Path("recipes/countdown/base"), Path("recipes/countdown/drafter")
DEPTH = 4

in_vllm = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make vllm-test"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
"""What every test here carries."""

PARAMS = (
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=8, top_p=0.95, min_p=0.01),
    SamplingParams(1.0, min_p=0.2),
    SamplingParams(1e-6),
    SamplingParams(1.5, top_k=3),
)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": 7,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2-bias": Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=False),
    "qwen3-norm": Qwen3Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
}


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes transformers' tiny model with random weights, biases and norms included."""
    model = AutoModelForCausalLM.from_config(FAMILIES[name]).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in key else 0.3 * noise if "bias" in key else 0.2 * noise)
    model.save_pretrained(folder)
    return folder


def make_drafter(model: Path, folder: Path, method: str = "eagle", seed: int = 2) -> Path:
    """Writes a drafter with random weights, which is nearly always wrong."""
    shape = drafter_shape(load_model_config(model), method)  # type: ignore[arg-type]
    save_drafter(folder, DraftModel(shape).initialize(seed), torch.float32, {})
    return folder


def vllm_engine(model: Path, speculation: str, drafter: Path | None = None, batch: int = 8, **vllm: Any) -> Any:
    settings = EngineSettings(
        speculation,
        engine="vllm",
        max_batch_size=batch,
        drafting=DrafterSection(train=drafter is not None),
        kv_gib=0.25,
        vllm=VllmSection(**{"compile": False} | vllm),
        window=400,
    )
    return load_engine(load_model(model, torch.float32), settings, drafter)


def own_engine(model: Path, batch: int = 16) -> Any:
    return load_engine(load_model(model, torch.float32), EngineSettings(max_batch_size=batch))


def requests_for(vocab_size: int, num: int, seed: int, stop_ids: Sequence[int], longest: int = 24) -> list[Request]:
    """Prompts from one token on, responses from one token on, every sampling setting in turn."""
    rng, found = random.Random(seed), []
    for index in range(num):
        ids = tuple(rng.randrange(3, vocab_size) for _ in range(1 if index % 4 == 0 else rng.randint(2, 20)))
        num_tokens = 1 if index % 5 == 4 else rng.randint(2, longest)
        params = replace(PARAMS[index % len(PARAMS)], max_tokens=num_tokens, stop_ids=tuple(stop_ids), seed=seed)
        found.append(Request(f"p{index}", index % 3, ids, params, "rollout", 2))
    return found


def assert_equal(requests: Sequence[Request], own: Any, theirs: Responses, model: Path) -> None:
    """Our own engine gives the same tokens, endings and log-probabilities; a near-tie would be named."""
    compared = compare(requests, answers(own, requests), theirs, model)
    assert compared.differences == ()
    assert compared.num_equal == len(requests)
    assert compared.logprob_gap < 2e-4
