"""Converts a GGUF file of the Llama family to a Hugging Face folder. Needs the package gguf.

    token_embd.weight    Q8_0 ─ dequantize ────────────────▶ model.embed_tokens.weight               F32
    blk.0.attn_q.weight  Q4_1 ─ dequantize ─ reorder rows ─▶ model.layers.0.self_attn.q_proj.weight  F32
    llama.*, tokenizer.* ──────────────────────────────────▶ config.json, tokenizer.json, chat template

transformers reads such files, too, but needs the whole model in memory, and splits numbers otherwise than in
the model's training (see `_build_tokenizer`). The tests compare both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tlt.hf.config import parse_config
from tlt.hf.weights import expected_shapes, save_model
from tlt.io.extras import how_to_install
from tlt.io.files import write_json
from tlt.io.text import one_line
from tlt.models.decoder import ModelConfig
from tlt.types import UserError

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
"""Keys of config.json, and the file's keys for them, behind "llama."."""

_TOKEN_IDS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_CONTROL = 3
"""The type of tokens that never stand for text."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    num_parameters: weights of the model.
    stored_as: the type of most tensors in the file, such as "Q4_1".
    """

    num_parameters: int
    stored_as: str


def convert_gguf(file: Path, folder: Path) -> Converted:
    """Writes the model of a GGUF file into `folder`, in float32, which holds the dequantized values exactly.
    Raises UserError without gguf, for a file that is no GGUF, and for another family's model or tokenizer."""
    reader = _open(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    config = _read_config(file, values, {tensor.name for tensor in reader.tensors})
    ids = {f"{token}_id": values.get(f"tokenizer.ggml.{name}_token_id") for token, name in _TOKEN_IDS.items()}
    token_ids = {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tensors = _read_tensors(file, reader, config)
    with tempfile.TemporaryDirectory() as companions:
        _build_tokenizer(file, values, ids, config).save_pretrained(companions)
        write_json(Path(companions, "generation_config.json"), token_ids)
        write_json(Path(companions, "config.json"), token_ids)
        save_model(folder, config, tensors, dtype=torch.float32, source=companions)
    stored = [tensor.tensor_type.name for tensor in reader.tensors]
    return Converted(sum(tensor.numel() for tensor in tensors.values()), max(set(stored), key=stored.count))


def require_gguf() -> ModuleType:
    """Returns the package gguf. Raises UserError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            f"GGUF files need the package gguf, which is not installed; {how_to_install('gguf')}"
        ) from None
    package: ModuleType = gguf
    return package


def _open(file: Path) -> Any:
    """Returns gguf's reader, which maps the file into memory."""
    gguf = require_gguf()
    try:
        return gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:  # numpy's, where a damaged file ends early
        said = one_line(error, 120)
        raise UserError(f"{file}: is no readable GGUF file ({said}); download it again") from None


def _read_config(file: Path, values: Mapping[str, Any], tensors: set[str]) -> ModelConfig:
    if (family := values.get("general.architecture")) != "llama":
        raise UserError(f"{file}: general.architecture is {family!r}; only llama is read")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return parse_config(raw | {key: values.get(f"llama.{name}") for key, name in _SIZES.items()}, str(file))


def _read_tensors(file: Path, reader: Any, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the model's tensors by their Hugging Face names. Raises UserError where they are not exactly
    those of the configuration."""
    gguf = require_gguf()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    their_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    shapes = expected_shapes(config)
    names = {name: str(their_names.get_name(name, try_suffixes=(".weight",))) for name in shapes}
    if odd := sorted(stored.keys() ^ set(names.values())):
        state = "is unknown" if odd[0] in stored else "is missing"
        raise UserError(
            f"{file}: tensor {odd[0]} {state}; give a plain Llama model without adapters or rope scaling"
        )
    tensors = {}
    for name, theirs in names.items():
        values = gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        tensor = torch.tensor(values, dtype=torch.float32)
        if tensor.shape != shapes[name]:
            shape = f"{list(tensor.shape)}, not {list(shapes[name])}"
            raise UserError(f"{file}: tensor {theirs} has shape {shape}; download it again")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _halves_of_heads(tensor, config.head_dim)
        tensors[name] = tensor
    return tensors


def _halves_of_heads(weight_OI: Tensor, head_dim: int) -> Tensor:
    """Returns a query or key projection with its rows in Hugging Face's order. The two rows of a rotary pair
    are neighbours in llama.cpp, and in the two halves of the head in Hugging Face."""
    pairs = weight_OI.view(-1, head_dim // 2, 2, weight_OI.shape[1])
    return pairs.transpose(1, 2).reshape(weight_OI.shape)


def _build_tokenizer(
    file: Path, values: Mapping[str, Any], ids: Mapping[str, int | None], config: ModelConfig
) -> Any:
    """Returns the tokenizer of the file's vocabulary and merges: it splits digits, then applies byte-level
    BPE.

    The file calls that split "smollm": " 47" becomes " ", "4" and "7". transformers omits it, so its tokens
    differ where a digit follows two or more spaces.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UserError(f"{file}: its tokenizer is {'/'.join(map(str, kind))}; only gpt2/smollm is read")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    named = {token: tokens[index] for token in _TOKEN_IDS if (index := ids[f"{token}_id"]) is not None}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=config.max_positions, **named)
    fast.chat_template = values.get("tokenizer.chat_template")
    return fast
