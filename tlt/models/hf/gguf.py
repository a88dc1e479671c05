"""Converts a GGUF file to a Hugging Face folder, dequantized to float32 by transformers."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlt.base.io.extras import how_to_install
from tlt.base.io.files import write_json
from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.models.hf.config import parse_config
from tlt.models.hf.weights import expected_shapes, save_model


@dataclass(frozen=True)
class Converted:
    """stored_as: the type of most tensors, such as "Q4_1"."""

    num_parameters: int
    stored_as: str


def require_gguf() -> None:
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"GGUF files need the package {missing[0]}, which is not installed; {how_to_install('gguf')}"
        )


def convert_gguf(file: Path, folder: Path) -> Converted:
    """UserError if transformers or our decoder cannot read the file."""
    require_gguf()
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        reader = gguf.GGUFReader(file)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except (OSError, ValueError, IndexError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{file}: transformers does not read it ({one_line(error, 120)})") from None
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("tokenizer.ggml.pre") == "smollm":
        _cut_digits(tokenizer)
    tokenizer.model_max_length = read.config.max_position_embeddings
    raw = read.config.to_dict() | {"architectures": [type(read).__name__], "quantization_config": None}
    config = parse_config(raw, str(file))
    tensors = {name: tensor for name, tensor in read.state_dict().items() if name in expected_shapes(config)}
    token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        write_json(Path(companions, "generation_config.json"), token_ids)
        write_json(Path(companions, "config.json"), token_ids)
        save_model(folder, config, tensors, dtype=torch.float32, source=companions)
    stored = [tensor.tensor_type.name for tensor in reader.tensors]
    return Converted(sum(tensor.numel() for tensor in tensors.values()), max(set(stored), key=stored.count))


def _cut_digits(tokenizer: Any) -> None:
    """Cuts every digit off before the merges, as llama.cpp's pre-tokenizer "smollm" does and transformers'
    reading does not: "  47" becomes "  ", "4" and "7"."""
    from tokenizers import pre_tokenizers

    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
