"""A Hugging Face folder becomes a GGUF file; what transformers reads of that file is the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

from benchmarks.gguf_export import export_gguf
from tests.lossless.helpers import CONFIG, make_policy
from tlt.hf.weights import save_model
from tlt.models.decoder import ModelConfig, RopeScaling
from tlt.types import UserError

CONFIGS = {
    "llama": replace(CONFIG, rope_theta=500.0, rms_norm_eps=2.0**-16),
    "qwen2": replace(CONFIG, architecture="qwen2", tie_embeddings=False),
    "qwen3": replace(
        CONFIG, architecture="qwen3", head_dim=128
    ),  # the only size that transformers reads there
}


def write(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model and its GGUF file; returns the model's folder, beside which the file lies."""
    policy = make_policy(config=config).float()
    with torch.no_grad():
        for tensor in policy.parameters():
            if tensor.dim() == 1:  # norms are not all ones, biases not all zeros
                tensor.add_(torch.linspace(0.1, 0.4, len(tensor)))
    save_model(path / "model", config, dict(policy.state_dict()), dtype=torch.float32, source=None)
    export_gguf(path / "model", path / "model.gguf", dtype)
    return path / "model"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_computes_the_same_with_the_file_as_with_the_folder(
    tmp_path: Path, config: ModelConfig
) -> None:
    pytest.importorskip("accelerate")  # which transformers wants to read a GGUF
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path, config)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)


def test_matrices_have_the_asked_for_type_and_vectors_float32(tmp_path: Path) -> None:
    import gguf

    folder = write(tmp_path, CONFIGS["qwen2"], torch.bfloat16)
    tensors = {t.name: t for t in gguf.GGUFReader(folder.with_suffix(".gguf")).tensors}
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {types[name] for name in ("token_embd.weight", "output.weight", "blk.1.ffn_down.weight")} == {
        "BF16"
    }
    assert {
        types[name] for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.bias")
    } == {"F32"}
    assert tuple(tensors["blk.0.ffn_up.weight"].shape) == (CONFIG.hidden_size, CONFIG.intermediate_size)


def test_a_file_that_is_cut_off_is_not_left_under_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(UserError):
        export_gguf(folder, tmp_path / "again.gguf", torch.float32)
    assert not (tmp_path / "again.gguf").exists()


def test_scaled_rotary_frequencies_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 128))
    with pytest.raises(UserError, match="rope scaling, which is not exported"):
        write(tmp_path, config)
