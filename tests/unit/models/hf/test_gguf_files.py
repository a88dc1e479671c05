"""A GGUF file becomes the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.refused import refused
from tests.unit.models.hf.gguf_parts import VOCABULARY, make_model, write_gguf
from tlt.models.hf.families import load_model_config
from tlt.models.hf.files import read_json
from tlt.models.hf.gguf import convert_gguf
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.models.hf.weights import load_tensors, stored_dtype


def convert(path: Path, kind: str = "F32", ties_head: bool = True) -> Path:
    convert_gguf(write_gguf(path / f"{kind}.gguf", make_model(ties_head), kind), path / kind)
    return path / kind


@pytest.mark.parametrize("ties_head", [True, False])
def test_unquantized_weights_are_those_that_the_file_was_made_of(tmp_path: Path, ties_head: bool) -> None:
    folder = convert(tmp_path, "F32", ties_head)
    config = load_model_config(folder)
    assert config.tie_embeddings is ties_head
    assert (config.rms_norm_eps, config.rope_theta, config.max_positions) == (2.0**-16, 500.0, 128)
    tensors, expected = load_tensors(folder, config), make_model(ties_head).state_dict()
    assert tensors.keys() == expected.keys() - ({"lm_head.weight"} if ties_head else set())
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


def test_an_embedding_stored_twice_stays_tied_and_is_the_finer_copy(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "twice.gguf", make_model(ties_head=True), "Q4_1", head="F32")
    convert_gguf(file, tmp_path / "out")
    config = load_model_config(tmp_path / "out")
    assert config.tie_embeddings
    name = "model.embed_tokens.weight"
    expected = make_model(ties_head=True).state_dict()[name]
    assert torch.equal(load_tensors(tmp_path / "out", config)[name], expected)


def test_weights_are_written_in_the_number_type_asked_for(tmp_path: Path) -> None:
    convert_gguf(
        write_gguf(tmp_path / "m.gguf", make_model(ties_head=True)), tmp_path / "out", torch.bfloat16
    )
    assert stored_dtype(tmp_path / "out") == torch.bfloat16
    assert read_json(tmp_path / "out" / "config.json")["torch_dtype"] == "bfloat16"


def test_quantized_weights_are_near_those_that_the_file_was_made_of(tmp_path: Path) -> None:
    folder = convert(tmp_path, "Q4_1")
    name = "model.layers.0.mlp.up_proj.weight"
    found = load_tensors(folder, load_model_config(folder))[name]
    assert 0 < (found - make_model(ties_head=True).state_dict()[name]).abs().max() < 0.15


def test_every_digit_is_a_token_and_control_tokens_end_responses(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert(tmp_path))
    for text in ("ab ab", "What's 1+2?", "a\n\n  b", "naïve 日本 😀", "<|im_start|>ab<|im_end|>\n"):
        assert tokenizer.hf.decode(tokenizer.encode_text(text)) == text
    pieces = [tokenizer.hf.convert_ids_to_tokens(tokenizer.encode_text(text)) for text in ("12", " 7", "  7")]
    assert pieces == [["1", "2"], ["Ġ", "7"], ["ĠĠ", "7"]], "as llama.cpp's pre-tokenizer smollm cuts"
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.decode([VOCABULARY.index("a"), 2]) == "a"
    assert (tokenizer.hf.bos_token_id, tokenizer.hf.eos_token_id, tokenizer.hf.pad_token_id) == (1, 2, 2)
    assert tokenizer.hf.model_max_length == 128
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}])


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_model(ties_head=True), **{"rope.scaling.type": "yarn"})
    with refused("its positions are scaled, which transformers does not read"):
        convert_gguf(file, tmp_path / "out")


@pytest.mark.parametrize("length", [0, 3, 100, 20_000])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, length: int) -> None:
    whole = write_gguf(tmp_path / "m.gguf", make_model(ties_head=True)).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:length])
    with refused(r"cut.gguf: transformers does not read it"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
