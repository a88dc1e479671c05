"""A GGUF file becomes the checkpoint that it was made of; what transformers reads of the same file is the
reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

from tests.unit.hf.gguf_parts import VOCABULARY, make_model, write_gguf
from tlt.hf.config import load_model_config
from tlt.hf.gguf import convert_gguf
from tlt.hf.tokenizer import load_tokenizer
from tlt.hf.weights import load_tensors
from tlt.types import UserError


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


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_dequantized_weights_and_logits_are_those_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("accelerate")  # which transformers wants to read a GGUF
    from transformers import AutoModelForCausalLM

    folder = convert(tmp_path, kind)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=f"{kind}.gguf", dtype=torch.float32
    ).eval()
    expected, tensors = read.state_dict(), load_tensors(folder, load_model_config(folder))
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
        assert torch.equal(ours, read(ids).logits)
    if kind == "Q4_1":  # so that equality of the wrong thing, such as of zeros, is seen
        exact = make_model(ties_head=True).state_dict()["model.layers.0.mlp.up_proj.weight"]
        assert 0 < (tensors["model.layers.0.mlp.up_proj.weight"] - exact).abs().max() < 0.15


def test_text_becomes_the_ids_that_transformers_makes_of_the_file_but_for_digits_after_blanks(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(convert(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="F32.gguf")
    for text in ("ab ab", "What's 1+2?", "a\n\n  b", "naïve 日本 😀", "<|im_start|>ab<|im_end|>\n"):
        ids = list(ours.encode_text(text))
        assert ids == theirs(text)["input_ids"]
        assert ours.hf.decode(ids) == text
    pieces = [ours.hf.convert_ids_to_tokens(ours.encode_text(text)) for text in ("12", " 7", "  7")]
    assert pieces == [["1", "2"], ["Ġ", "7"], ["ĠĠ", "7"]], (
        "llama.cpp's pre-tokenizer smollm cuts every digit off first"
    )
    chat = [{"role": "user", "content": "ab"}]
    assert list(ours.encode_chat(chat)) == theirs.apply_chat_template(chat, tokenize=True, return_dict=False)


def test_control_tokens_end_responses_and_stand_in_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert(tmp_path))
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.decode([VOCABULARY.index("a"), 2]) == "a"
    assert (tokenizer.hf.bos_token_id, tokenizer.hf.eos_token_id, tokenizer.hf.pad_token_id) == (1, 2, 2)
    assert tokenizer.hf.model_max_length == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only llama is read"),
        ({"pre": "llama-bpe"}, "its tokenizer is gpt2/llama-bpe; only gpt2/smollm is read"),
        ({"block_count": 3}, "tensor blk.2.attn_k.weight is missing"),
        ({"block_count": 1}, "tensor blk.1.attn_k.weight is unknown"),
        ({"feed_forward_length": 95}, r"tensor blk.0.ffn_gate.weight has shape \[96, 64\], not \[95, 64\]"),
        ({"embedding_length": None}, "hidden_size is None; it must be a positive integer"),
    ],
)
def test_a_model_of_another_kind_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_model(ties_head=True), **changes)
    with pytest.raises(UserError, match=message) as refused:
        convert_gguf(file, tmp_path / "out")
    assert str(refused.value).startswith(f"{file}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 3, 100, 20_000])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, length: int) -> None:
    whole = write_gguf(tmp_path / "m.gguf", make_model(ties_head=True)).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:length])
    with pytest.raises(UserError, match=r"cut.gguf: is no readable GGUF file .*; download it again"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
