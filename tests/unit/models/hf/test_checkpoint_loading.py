"""Loading: what we read is what transformers reads, and a directory with anything else is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.models.hf.checkpoint_parts import edit_tensors, logits, refusal, theirs
from tlt.models.hf.families import load_model_config
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.models.hf.weights import content_hash, expected_shapes, load_tensors, read_safetensors


@pytest.mark.parametrize("max_shard_size", ["1GB", "9KB"])
def test_what_transformers_saves_we_load(case: str, max_shard_size: str, tmp_path: Path) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (max_shard_size == "9KB")
    config = load_model_config(tmp_path)
    tensors = load_tensors(tmp_path, config)
    parameters = dict(model.named_parameters())
    assert list(tensors) == list(expected_shapes(config))
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameters[name]) for name in tensors)
    token_ids = [5, 9, 60, 0, 33]
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits(config, tensors, token_ids), expected, atol=1e-4, rtol=0)


def test_tensors_come_in_their_stored_dtype_or_the_one_asked_for(saved: Path) -> None:
    edit_tensors(
        saved, {name: tensor.bfloat16() for name, tensor in load_file(saved / "model.safetensors").items()}
    )
    config = load_model_config(saved)
    assert {tensor.dtype for tensor in load_tensors(saved, config).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_tensors(saved, config, torch.float64).values()} == {torch.float64}


def test_a_stored_copy_of_a_tied_head_and_old_rotary_buffers_are_dropped(tmp_path: Path) -> None:
    theirs("qwen3-tied").save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    before = content_hash(load_tensors(tmp_path, config))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(
        tmp_path, {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    assert content_hash(load_tensors(tmp_path, config)) == before
    edit_tensors(tmp_path, {"lm_head.weight": embedding + 1})
    message = refusal(load_tensors, tmp_path, config)
    assert str(tmp_path / "model.safetensors") in message
    assert "lm_head.weight differs" in message
    assert "tie_word_embeddings" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, dtype: torch.dtype, saved: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(saved / "model.safetensors")[name].to(dtype)
    tensor[3, 4] = value
    edit_tensors(saved, {name: tensor})
    message = refusal(load_tensors, saved, load_model_config(saved))
    assert message.startswith(
        f"{saved / 'model.safetensors'}: tensor {name} holds NaN or infinite values as "
    )
    assert "download" in message


def test_weights_that_the_wanted_type_cannot_hold_are_refused_by_name(saved: Path) -> None:
    tensor = load_file(saved / "model.safetensors")["model.norm.weight"]
    edit_tensors(saved, {"model.norm.weight": tensor + 1e6})
    config = load_model_config(saved)
    assert load_tensors(saved, config)["model.norm.weight"].max() > 9e5
    assert "model.norm.weight holds NaN or infinite values as float16;" in refusal(
        load_tensors, saved, config, torch.float16
    )


REFUSED_TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    (
        {"model.layers.1.self_attn.k_proj.bias": None},
        "tensor model.layers.1.self_attn.k_proj.bias is missing;",
    ),
    (
        {"lm_head.weight": None, "model.norm.weight": None},
        "tensor model.norm.weight (and 1 more) is missing;",
    ),
    (
        {"model.layers.2.input_layernorm.weight": torch.ones(32)},
        "tensor model.layers.2.input_layernorm.weight is unknown;",
    ),
    ({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, "tensor a (and 2 more) is unknown;"),
    (
        {"model.norm.weight": torch.ones(33)},
        "tensor model.norm.weight has shape [33]; config.json asks for [32];",
    ),
    ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "tensor model.norm.weight has dtype I8;"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED_TENSORS, ids=lambda value: str(value)[:50])
def test_other_tensors_than_the_expected_are_refused_by_name(
    changes: dict[str, Tensor | None], named: str, saved: Path
) -> None:
    edit_tensors(saved, changes)
    message = refusal(load_tensors, saved, load_model_config(saved))
    assert message.startswith(f"{saved / 'model.safetensors'}: {named}")
    assert len(message.partition("; ")[2]) > 10


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    theirs("qwen2").save_pretrained(tmp_path, max_shard_size="9KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    assert f"{second}: tensor {name} is also in {first.name};" in refusal(
        load_tensors, tmp_path, load_model_config(tmp_path)
    )


def test_incomplete_directories_are_refused(tmp_path: Path, saved: Path) -> None:
    config = load_model_config(saved)
    nowhere = tmp_path / "nowhere"
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere}: is no directory;")
    assert refusal(load_tensors, nowhere, config).startswith(f"{nowhere}: is no directory;")
    nowhere.mkdir()
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere / 'config.json'}: is missing;")
    assert "holds neither model.safetensors nor model.safetensors.index.json;" in refusal(
        load_tensors, nowhere, config
    )
    (nowhere / "pytorch_model.bin").touch()
    message = refusal(load_tensors, nowhere, config)
    assert "holds pytorch_model.bin but no safetensors; convert it" in message
    assert "save_pretrained" in message
    (nowhere / "config.json").write_text("{")
    assert refusal(load_model_config, nowhere).startswith(f"{nowhere / 'config.json'}: is no JSON")
    (nowhere / "config.json").write_text("[]")
    assert "holds a JSON list" in refusal(load_model_config, nowhere)
    (nowhere / "model.safetensors.index.json").write_text("{}")
    assert "weight_map is missing or empty;" in refusal(load_tensors, nowhere, config)


def test_a_missing_shard_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    theirs("qwen2").save_pretrained(tmp_path, max_shard_size="9KB")
    config = load_model_config(tmp_path)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-1])
    assert refusal(load_tensors, tmp_path, config).startswith(f"{second}: is no readable safetensors file")
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(load_tensors, tmp_path, config)
    first.unlink()
    assert f"index.json: shard {first.name} is missing;" in refusal(load_tensors, tmp_path, config)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"],
)
def test_a_pipe_in_a_models_folder_is_one_line_and_nobody_waits_for_it(name: str, saved: Path) -> None:
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    for read in (load_model_config, load_tokenizer, read_safetensors):
        assert refusal(read, saved) == (
            f"{saved / name}: is a pipe or a device, no file; put the file in its place"
        )
