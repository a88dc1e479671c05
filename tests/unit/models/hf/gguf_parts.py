"""A tiny model as GGUF, written as llama.cpp's converter does: with rows of queries and keys in pairs,
quantized or not."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(bytes_to_unicode().values())
MERGES = ["Ġ Ġ", "a b", "Ġ ab", "1 2"]
"""The last is of two digits: it can happen only where they are not cut apart."""
VOCABULARY = [*CONTROLS, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
HEADS, KV_HEADS = 4, 2
LICENCE = "A licence.\n"


def make_model(ties_head: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "tie_word_embeddings": ties_head,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(VOCABULARY), rms_norm_eps=2.0**-16, rope_theta=500.0, **sizes, **heads)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def write_gguf(
    path: Path, model: LlamaForCausalLM, kind: str = "F32", head: str | None = None, **changes: Any
) -> Path:
    """Writes matrices as `kind`, vectors as F32. head: the head's kind, written even if it is tied; None: as
    `kind`, unless tied. changes: metadata by key, in place of the usual; None leaves the key out."""
    config = model.config
    numbers = {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    numbers |= {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    numbers |= {
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": config.head_dim,
    }
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for key, number in ({**numbers, "vocab_size": len(VOCABULARY)} | changes).items():
        if isinstance(number, int):
            writer.add_uint32(f"llama.{key}", number)
        elif isinstance(number, str) and "." in key:
            writer.add_string(f"llama.{key}", number)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3 if token in CONTROLS else 1 for token in VOCABULARY])
    writer.add_token_merges(MERGES)
    for name, token_id in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored: str | None = kind
        if name == "lm_head.weight":
            stored = head or (None if config.tie_word_embeddings else kind)
        if stored is not None:
            _add(writer, names.get_name(name, (".weight",)), in_pairs(name, tensor.numpy()), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_pairs(name: str, weight: np.ndarray) -> np.ndarray:
    """Returns a weight as llama.cpp's convert_hf_to_gguf.py has it."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """Writes a wheel as pip wants one: a zip with a RECORD and metadata, whose name says project and
    version."""
    project, version, *_ = path.name.split("-")
    info = f"{project}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project.replace('_', '-')}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {
            **members,
            f"{info}/LICENSE": LICENCE.encode(),
            f"{info}/METADATA": metadata.encode(),
        }.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def _add(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quantize(weight, stored), raw_dtype=stored)
