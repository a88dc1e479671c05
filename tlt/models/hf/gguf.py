"""Converts a GGUF file to a Hugging Face folder.

llama.cpp quantizes a tied embedding twice: as input table and, in more bits, as head. The head's copy is
kept, and the two stay tied.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.base.io.extras import how_to_install
from tlt.base.io.files import write_json
from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.models.hf.config import parse_config
from tlt.models.hf.weights import expected_shapes, save_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_ROUNDING = 0.2
"""Relative distance of two quantizations of one matrix: 0.04 of Q5_0 from Q8_0, 0.07 of Q4_K from Q6_K. Of
two matrices it is about 1."""


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


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Converted:
    """Raises UserError if transformers or our decoder cannot read the file."""
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
    is_scaled = any(name.endswith(".rope.scaling.type") and of != "none" for name, of in values.items())
    if is_scaled or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        what = "its positions are scaled, which transformers does not read of such a file"
        raise UserError(f"{file}: {what}; use the model's safetensors")
    tokenizer.model_max_length = read.config.max_position_embeddings
    raw = read.config.to_dict() | {"architectures": [type(read).__name__], "quantization_config": None}
    stored = read.state_dict()
    if _are_one_matrix(stored):
        stored[EMBEDDING] = stored[HEAD]
        raw["tie_word_embeddings"] = True
    config = parse_config(raw, str(file))
    tensors = {name: tensor for name, tensor in stored.items() if name in expected_shapes(config)}
    token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        write_json(Path(companions, "generation_config.json"), token_ids)
        write_json(Path(companions, "config.json"), token_ids)
        save_model(folder, config, tensors, dtype=dtype, source=companions)
    types = [tensor.tensor_type.name for tensor in reader.tensors]
    return Converted(sum(tensor.numel() for tensor in tensors.values()), max(set(types), key=types.count))


def _are_one_matrix(tensors: Mapping[str, Tensor]) -> bool:
    if HEAD not in tensors:
        return False
    embedding, head = (tensors[name][:4096] for name in (EMBEDDING, HEAD))
    return bool((head - embedding).norm() < MOST_ROUNDING * head.norm())


def _cut_digits(tokenizer: Any) -> None:
    """As llama.cpp's pre-tokenizer "smollm", and unlike transformers: "  47" becomes "  ", "4" and "7"."""
    from tokenizers import pre_tokenizers

    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
