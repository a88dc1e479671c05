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
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.side_by_side import Comparison, Responses, answers, compare
from tests.vllm.children import BASE as BASE
from tests.vllm.children import DEPTH as DEPTH
from tlt.apps.audit.referee import Referee
from tlt.base.config.drafter import DrafterSection
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import parse_speculation
from tlt.base.types import FinishReason, Request, Rollout, SamplingParams
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.engine.build.engine import load_engine
from tlt.engine.build.model import load_model, load_model_for
from tlt.engine.settings import EngineSettings
from tlt.models.hf.families import load_model_config
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample

DRAFTER = Path("recipes/countdown/drafter")

with_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make vllm-test"
)
in_vllm = [with_vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings
"""What every test carries that runs vLLM here."""

served = [
    with_vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("openai") is None, reason="the openai client is not installed here"
    ),
    pytest.mark.filterwarnings("default"),  # vLLM's own warnings
    pytest.mark.slow,
]
"""What every test carries that asks a server of vLLM's."""

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
SLIDING = {"sliding_window": 24}
"""Shorter than most sequences here."""

FOREIGN: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, **SLIDING, num_key_value_heads=2, tie_word_embeddings=False),
    "gemma2": Gemma2Config(
        **SIZES, **SLIDING, num_key_value_heads=1, query_pre_attn_scalar=4, attn_logit_softcapping=2.0
    ),
    "gemma3": Gemma3TextConfig(**SIZES, **SLIDING, num_key_value_heads=1, query_pre_attn_scalar=32),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
    ),
}
"""Families that our own decoder does not compute. Experts of 48 are padded by vLLM's kernel, and one layer
is dense."""


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes transformers' tiny model with random weights, biases and norms included."""
    model = AutoModelForCausalLM.from_config((FAMILIES | FOREIGN)[name]).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.3 * noise if "norm" in key else 0.3 * noise if "bias" in key else 0.2 * noise
            )
    model.save_pretrained(folder)
    return folder


def make_drafter(model: Path, folder: Path, method: str = "eagle", seed: int = 2) -> Path:
    """Writes a drafter with random weights, which is nearly always wrong."""
    shape = drafter_shape(load_model_config(model), method)  # type: ignore[arg-type]
    save_drafter(folder, new_model(shape).initialize(seed), torch.float32, {})
    return folder


def vllm_engine(
    model: Path,
    speculation: str,
    drafter: Path | None = None,
    batch: int = 8,
    window: int = 400,
    own_process: bool = False,
    **vllm: Any,
) -> Any:
    settings = EngineSettings(
        parse_speculation(speculation),
        engine="vllm",
        max_batch_size=batch,
        drafting=DrafterSection(train=drafter is not None),
        kv_gib=0.25,
        vllm=VllmSection(**{"compile": False} | vllm),
        window=window,
        own_process=own_process,
    )
    return load_engine(load_model_for(model, "vllm"), settings, drafter)


def own_engine(model: Path, batch: int = 16) -> Any:
    return load_engine(load_model(model, torch.float32), EngineSettings(max_batch_size=batch))


def requests_for(
    vocab_size: int, num: int, seed: int, stop_ids: Sequence[int], longest: int = 24
) -> list[Request]:
    """Prompts from one token on, responses from one token on, every sampling setting in turn."""
    rng, found = random.Random(seed), []
    for index in range(num):
        ids = tuple(rng.randrange(3, vocab_size) for _ in range(1 if index % 4 == 0 else rng.randint(2, 20)))
        num_tokens = 1 if index % 5 == 4 else rng.randint(2, longest)
        params = replace(
            PARAMS[index % len(PARAMS)], max_tokens=num_tokens, stop_ids=tuple(stop_ids), seed=seed
        )
        found.append(Request(f"p{index}", index % 3, ids, params, "rollout", 2))
    return found


def repeating(num: int) -> list[Request]:
    """Prompts that say something twice: retrieval finds what to draft."""
    ids = [tuple((i * 5 + j % 6 + 8) % 50 + 8 for j in range(14)) for i in range(num)]
    return [Request(f"r{i}", 0, one, SamplingParams(0.3, max_tokens=20, seed=1)) for i, one in enumerate(ids)]


def assert_equal(requests: Sequence[Request], own: Any, theirs: Responses, model: Path) -> None:
    """Our own engine gives the same tokens, endings and log-probabilities; a near-tie would be named."""
    compared = compare(requests, answers(own, requests), theirs, model)
    assert compared.differences == ()
    assert compared.num_equal == len(requests)
    assert compared.logprob_gap < 2e-4


def judge(requests: Sequence[Request], theirs: Responses, model: Path) -> Comparison:
    """Compares with what the law draws from the logits that transformers computes for the whole response,
    in float32."""
    referee = Referee(model)
    lawful = {
        (r.problem_id, r.sample_index): _by_the_law(r, theirs[r.problem_id, r.sample_index], referee)
        for r in requests
    }
    return compare(requests, lawful, theirs, model)


def assert_lawful(requests: Sequence[Request], theirs: Responses, model: Path) -> None:
    """Every token is the law's, but for a near-tie at most, which the report of a failure names."""
    compared = judge(requests, theirs, model)
    assert [difference for difference in compared.differences if not difference.is_near_tie] == []
    assert len(compared.differences) <= 1
    assert compared.num_equal + len(compared.differences) == len(requests)
    assert compared.logprob_gap < 2e-4


def _by_the_law(request: Request, theirs: Rollout, referee: Referee) -> Rollout:
    """Draws at every position behind the tokens that they have there, and ends where a response has to."""
    num_prompt, num_tokens = len(request.prompt_ids), len(theirs.token_ids)
    logits_TV = torch.cat(list(referee.logits(request.prompt_ids, theirs.token_ids)))
    positions_1T = torch.arange(num_prompt, num_prompt + num_tokens)[None]
    noise_1TV = gumbel_noise(keys_tensor([request.noise_key]), positions_1T, logits_TV.shape[-1])
    tokens_1T, logprobs_1T = sample(logits_TV[None], noise_1TV, BatchParams.of([request.params]))
    tokens, logprobs = tokens_1T[0].tolist(), logprobs_1T[0].tolist()
    stops = [index for index, token in enumerate(tokens) if token in request.params.stop_ids]
    end = stops[0] + 1 if stops else min(request.params.max_tokens, referee.window - num_prompt)
    missing = [-1] * (end > num_tokens)  # they have ended too soon
    reason: FinishReason = "stop" if stops else "length"
    return replace(
        theirs, token_ids=(*tokens[:end], *missing), logprobs=tuple(logprobs[:end]), finish_reason=reason
    )
