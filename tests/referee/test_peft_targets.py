"""Adapters that PEFT has saved, by every way to name their targets, give the matrices that PEFT merges. Runs
where PEFT is installed: pip install peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlt.engine.build.model import load_model

peft = pytest.importorskip("peft")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize(
    "said",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.2.mlp.up_proj"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": ["o_proj"], "use_rslora": True},
        {},
    ],
    ids=str,
)
def test_an_adapter_of_pefts_is_merged_as_peft_merges_it(said: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **said),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    found = load_model(tmp_path / "base", adapter=tmp_path / "adapter").tensors
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name].to(tensor.dtype), rtol=1e-5, atol=1e-5)
