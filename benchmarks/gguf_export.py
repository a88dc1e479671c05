"""A Hugging Face folder → a GGUF file that llama.cpp computes with: weights as they are, no tokenizer.

    python -m benchmarks.gguf_export FOLDER FILE [--dtype bfloat16]

    model.layers.0.self_attn.q_proj.weight ── rows of rotary pairs (llama alone) ─▶ blk.0.attn_q.weight      F32 or BF16
    model.layers.0.input_layernorm.weight  ── vectors stay as exact as they are ──▶ blk.0.attn_norm.weight   F32
    config.json                            ───────────────────────────────────────▶ llama.*, qwen2.*, qwen3.*

Prompts are given as token ids, so the file says "no_vocab" and how many ids there are. tlt/models/hf/gguf.py goes
the other way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.base.io.files import check_output_file
from tlt.base.types import UserError, resolve_dtype
from tlt.models.decoder import ModelConfig
from tlt.models.hf.families import load_model_config
from tlt.models.hf.gguf import require_gguf
from tlt.models.hf.weights import StoredTensors, expected_shapes


def export_gguf(folder: Path, file: Path, dtype: torch.dtype) -> None:
    """Writes the file, tensor by tensor, whole or not at all. Raises UserError for a model with scaled
    rotary frequencies."""
    require_gguf()
    import gguf

    config = load_model_config(folder)
    if config.rope_scaling is not None:
        raise UserError(f"{folder}: has rope scaling, which is not exported; give a model without")
    tensors, part = StoredTensors(folder, config), file.with_name(file.name + ".part")
    writer = gguf.GGUFWriter(part, config.architecture)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.architecture.upper()], config.num_layers)
    stored = _types(config, dtype)
    for name, (shape, type_) in stored.items():
        ending = "." + name.rsplit(".", 1)[1]
        theirs = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        assert theirs.endswith(ending), name
        raw = gguf.GGMLQuantizationType.BF16 if type_ == torch.bfloat16 else gguf.GGMLQuantizationType.F32
        bytes_ = torch.empty(0, dtype=type_).element_size()
        writer.add_tensor_info(
            theirs, _shape_in_bytes(shape, type_), _numpy_type(type_), shape.numel() * bytes_, raw
        )
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in _rows(config, tensors, stored):
            writer.write_tensor_data(tensor)
    part.replace(file)


def _describe(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _types(config: ModelConfig, dtype: torch.dtype) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns shape and type of every tensor in the file: llama.cpp wants vectors in float32."""
    shapes = expected_shapes(config)
    return {name: (shape, torch.float32 if len(shape) == 1 else dtype) for name, shape in shapes.items()}


def _rows(
    config: ModelConfig, tensors: Mapping[str, Tensor], stored: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> Iterator[Any]:
    """Yields the tensors as numpy arrays, in the order of `stored`."""
    for name, (_, type_) in stored.items():
        tensor = tensors[name]
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = pairs_of_heads(tensor, config.head_dim)
        tensor = tensor.to(type_).contiguous()
        yield (tensor.view(torch.uint8) if type_ == torch.bfloat16 else tensor).numpy()


def _shape_in_bytes(shape: torch.Size, type_: torch.dtype) -> tuple[int, ...]:
    """Returns the shape that gguf takes: of bytes, where numpy has no such type."""
    return (*shape[:-1], shape[-1] * 2) if type_ == torch.bfloat16 else tuple(shape)


def _numpy_type(type_: torch.dtype) -> Any:
    return torch.empty(0, dtype=torch.uint8 if type_ == torch.bfloat16 else type_).numpy().dtype


def pairs_of_heads(weight_OI: Tensor, head_dim: int) -> Tensor:
    """Returns the rows of a query or key projection as llama.cpp has them: the two rows that a rotation
    turns, side by side."""
    halves = weight_OI.view(-1, 2, head_dim // 2, weight_OI.shape[1])
    return halves.transpose(1, 2).reshape(weight_OI.shape)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    try:
        check_output_file(options.file, "FILE")
        export_gguf(options.folder, options.file, resolve_dtype(options.dtype))
    except UserError as error:
        print(f"benchmarks.gguf_export: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
