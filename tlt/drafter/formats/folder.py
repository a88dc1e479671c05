"""Drafter folders: config.json and model.safetensors in the layout of vLLM's EAGLE loaders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.base.io.files import replace_folder
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.drafter.formats.block_folder import BLOCK_ARCHITECTURE, block_from_hf, block_to_hf
from tlt.drafter.formats.foreign import (
    drop_repeated,
    flatten,
    method_of,
    read_fields,
    read_folder,
    with_vocabulary_map,
)
from tlt.drafter.forms import find_misfit
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import BlockShape, DrafterShape, EagleShape, Method, drafter_shape
from tlt.drafter.training.batch import Preset
from tlt.drafter.training.losses import DEFAULT_PRESET, PRESETS
from tlt.drafter.vocabulary import from_pairs, to_pairs
from tlt.models.decoder import ModelConfig
from tlt.models.hf.config import Fields, config_to_hf, parse_config
from tlt.models.hf.files import COUNTS, DRAFTER_FILES, read_json
from tlt.models.hf.weights import save_tensors

ARCHITECTURE: Mapping[Method, str] = {
    "eagle": "EagleLlamaForCausalLM",
    "eagle3": "LlamaForCausalLMEagle3",
    **BLOCK_ARCHITECTURE,
}

_UNREAD = "confidence_head."
"""Prefix of DSpark's tensors that predict acceptance."""


@dataclass(frozen=True)
class StoredDrafter:
    """about: facts about its origin.
    counts_V: decayed counts of sampled tokens (vocabulary.py), or None.
    left_out: names of tensors that were not read.
    """

    config: DrafterShape
    tensors: dict[str, Tensor]
    about: Mapping[str, Any]
    counts_V: Tensor | None = None
    left_out: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        if not self.left_out:
            return None
        return f"{', '.join(self.left_out)} of the drafter left out: nothing here reads a confidence head"

    @property
    def policy_hash(self) -> str | None:
        known: str | None = self.about.get("policy_hash")
        return known


def save_drafter(
    path: Path,
    model: DraftModel,
    dtype: torch.dtype,
    about: Mapping[str, Any] | None = None,
    counts_V: Tensor | None = None,
) -> None:
    """Replaces an existing folder. about: goes under the key "tlt" of config.json, which engines ignore."""
    save_stored(path, StoredDrafter(model.config, model.state_dict(), about or {}, counts_V), dtype)


def save_stored(path: Path, drafter: StoredDrafter, dtype: torch.dtype) -> None:
    tensors = {name: _stored(tensor, dtype) for name, tensor in drafter.tensors.items()}
    with replace_folder(path, DRAFTER_FILES) as folder:
        write_files(folder, tensors, drafter_to_hf(drafter.config, dtype, drafter.about))
        if drafter.counts_V is not None:
            write_counts(folder / COUNTS, drafter.counts_V)


def write_files(folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def drafter_to_hf(config: DrafterShape, dtype: torch.dtype, about: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, BlockShape):
        return block_to_hf(config, dtype, about)
    described = config_to_hf(config.layer, dtype, {"tlt": dict(about)})
    described["architectures"] = [ARCHITECTURE[config.method]]
    described |= {"model_type": "llama", "tie_word_embeddings": False}
    if config.method == "eagle3":
        assert isinstance(config, EagleShape), config
        described["norm_before_residual"] = config.norm_before_residual
        described["draft_vocab_size"] = config.draft_vocab_size
        described["eagle_aux_hidden_state_layer_ids"] = list(config.capture)
    return described


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def load_drafter(
    path: Path | str, target: ModelConfig, target_tensors: Mapping[str, Tensor] | None = None
) -> StoredDrafter:
    """Raises UserError if the folder cannot be read or does not fit the target.

    target_tensors: if given, copies of the target's embedding or head in the folder are compared with them.
    """
    path = Path(path)
    described, stored = read_folder(path)
    left_out = tuple(name for name in stored if name.startswith(_UNREAD))
    tensors = {name: tensor for name, tensor in stored.items() if name not in left_out}
    tensors = with_vocabulary_map(path, tensors, target.vocab_size)
    tensors = drop_repeated(path, tensors, described["method"], target.vocab_size, target_tensors)
    config = read_config(path, described, target, tensors)
    if (mismatch := find_misfit(config, tensors)) is not None:
        raise UserError(f"drafter {path}: {mismatch}; train a drafter for this model with tlt drafter train")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(
                f"drafter {path}: tensor {name} holds numbers that are not finite; train or copy it again"
            )
    counts_V = read_counts(path / COUNTS, target.vocab_size)
    return StoredDrafter(config, tensors, described.get("tlt") or {}, counts_V, left_out)


def load_shape(path: Path, target: ModelConfig) -> DrafterShape:
    """Reads config.json alone: tensors may add a head or bias."""
    fields = read_fields(path)
    return read_config(path, flatten(fields, method_of(fields, {})), target, {})


def choose_preset(name: str | None, drafter: StoredDrafter) -> Preset:
    """Raises UserError if the preset trains another form of drafter."""
    method = drafter.config.method
    name = name or drafter.about.get("preset") or DEFAULT_PRESET[method]
    if name not in PRESETS:
        raise UserError(f"drafter: its preset is {name!r}; train it by one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if preset.method != method:
        fitting = " or ".join(key for key, value in PRESETS.items() if value.method == method)
        raise UserError(f"preset: {name} does not train a drafter of form {method}; give {fitting}")
    return preset


def read_config(
    path: Path, described: Mapping[str, Any], target: ModelConfig, tensors: Mapping[str, Tensor]
) -> DrafterShape:
    """Raises UserError if the drafter does not fit the target."""
    method, fields = described["method"], Fields(described, f"drafter {path}")
    block = block_from_hf(fields, target) if method in BLOCK_ARCHITECTURE else None
    layer = parse_config(described, fields.source) if block is None else block.layer
    theirs = {"hidden_size": layer.hidden_size, "vocab_size": layer.vocab_size}
    if described.get("target_hidden_size") is not None:
        theirs["target_hidden_size"] = described["target_hidden_size"]
    for key, value in theirs.items():
        ours = getattr(target, key.removeprefix("target_"))
        if value != ours:
            remedy = "train a drafter for this model"
            raise UserError(f"{fields.source}: {key} is {shorten(value)}, the target's is {ours}; {remedy}")
    owns_head = "lm_head.weight" in tensors
    finish = target.head_scale, target.head_softcap
    scale, cap = (fields.number("logit_scale", 1.0), None) if owns_head else finish
    layer = dataclasses.replace(layer, head_scale=scale, head_softcap=cap)
    if block is not None:
        return dataclasses.replace(block, layer=layer, owns_head=owns_head)
    num_drafted = fields.integer("draft_vocab_size", target.vocab_size, most=target.vocab_size)
    shape = drafter_shape(target, method, num_drafted)
    assert isinstance(shape, EagleShape), method
    # EAGLE reads the output of the final norm, EAGLE-3 residual sums before it
    least, most = (target.num_layers,) * 2 if method == "eagle" else (0, target.num_layers - 1)
    layer = dataclasses.replace(layer, num_layers=1, tie_embeddings=True, max_positions=target.max_positions)
    return dataclasses.replace(
        shape,
        layer=layer,
        capture=fields.layers("eagle_aux_hidden_state_layer_ids", least, most) or shape.capture,
        owns_head=owns_head,
        has_bias="fc.bias" in tensors,
        norm_before_residual=described["norm_before_residual"],
    )


def write_counts(path: Path, counts_V: Tensor) -> None:
    ids, counts = to_pairs(counts_V.cpu())
    path.write_text(json.dumps({"token_ids": ids, "counts": [round(count, 2) for count in counts]}) + "\n")


def read_counts(path: Path, vocab_size: int) -> Tensor | None:
    """None without a file. Raises UserError for malformed counts, or another model's."""
    if not path.is_file():
        return None
    described = read_json(path)
    try:
        counts_V = from_pairs([described["token_ids"], described["counts"]], vocab_size)
        is_sound = bool(counts_V.isfinite().all()) and float(counts_V.min()) >= 0
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError):
        is_sound = False
    if not is_sound:
        remedy = "remove it, or copy it again"
        raise UserError(f"{path}: does not hold token_ids below {vocab_size} and their counts; {remedy}")
    return counts_V
