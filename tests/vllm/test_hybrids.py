"""A tiny LFM2 of one head in vLLM, judged by transformers' logits and the law, before and after a push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from tests.refused import refused
from tests.side_by_side import answers
from tests.vllm.parts import SIZES, assert_lawful, in_vllm, requests_for, vllm_engine
from tlt.engine.build.model import load_model

pytestmark = in_vllm


def save_lfm2(folder: Path, seed: int, num_heads: int = 1) -> Path:
    sizes: dict[str, Any] = SIZES | {
        "num_attention_heads": num_heads,
        "num_hidden_layers": 4,
        "head_dim": 64 // num_heads,
    }
    of_vllm: dict[str, Any] = {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64, "block_ff_dim": 96}
    kinds = ["conv", "full_attention", "conv", "conv"]
    config = Lfm2Config(
        **sizes, **of_vllm, num_key_value_heads=1, layer_types=kinds, block_auto_adjust_ff_dim=False
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def test_tokens_are_those_of_the_law_before_and_after_a_push(tmp_path: Path) -> None:
    model, other = save_lfm2(tmp_path / "model", 0), save_lfm2(tmp_path / "other", 1)
    requests = requests_for(SIZES["vocab_size"], 12, 3, (7,))
    engine = vllm_engine(model, "off")
    try:
        assert_lawful(requests, answers(engine, requests), model)
        engine.load_policy(load_model(other, torch.float32).tensors, 1)
        assert_lawful(requests, answers(engine, requests), other)
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's kernel for CPUs")
def test_more_heads_are_refused_on_a_cpu(tmp_path: Path) -> None:
    with refused("engine: vllm rotates the queries of LFM2's heads wrongly on a CPU; run it on a GPU"):
        vllm_engine(save_lfm2(tmp_path, 0, num_heads=2), "off")
