"""Drafter directories: config.json and model.safetensors in the layout that vLLM's EAGLE loaders read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.drafting.losses import DEFAULT_PRESET, PRESETS, Preset
from tlt.models.checkpoint import config_to_hf, parse_config
from tlt.models.drafter import DraftConfig, DraftModel, Method, drafter_config
from tlt.models.transformer import ModelConfig
from tlt.types import UserError

ARCHITECTURES: dict[str, Method] = {"EagleLlamaForCausalLM": "eagle", "LlamaForCausalLMEagle3": "eagle3"}


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter as a directory holds it. `about`: what its writer noted of its origin."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    about: Mapping[str, Any]


def save_drafter(path: Path, model: DraftModel, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> None:
    """Writes the drafter. `about` (what it was trained for and on, the policy's content hash among it) goes under the
    key "tlt" of config.json, which engines ignore."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(tensor, dtype) for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)  # safetensors creates its files for the owner alone
    (path / "config.json").write_text(json.dumps(describe(model.config, dtype, about), indent=2) + "\n")


def describe(config: DraftConfig, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a drafter."""
    described = config_to_hf(config.layer, dtype, {"tlt": dict(about or {})})
    described |= {"architectures": [name for name, method in ARCHITECTURES.items() if method == config.method]}
    described |= {"model_type": "llama", "tie_word_embeddings": False}
    if config.method == "eagle3":
        described |= {"draft_vocab_size": config.draft_vocab_size, "eagle_aux_hidden_state_layer_ids": list(config.capture)}
    return described


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def load_drafter(path: Path | str, target: ModelConfig) -> StoredDrafter:
    """A drafter, checked against the target it is to draft for: UserError, one line, otherwise."""
    path = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise UserError(f"drafter {path}: {name} is missing; give a directory that tlt drafter train wrote")
    try:
        described = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"drafter {path}: config.json is not valid JSON ({error}); train or copy it again") from None
    try:
        tensors = load_file(path / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise UserError(f"drafter {path}: model.safetensors cannot be read ({error}); train or copy it again") from None
    config = read_config(path, described, target, owns_head="lm_head.weight" in tensors)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DraftModel(config).state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found_shape = list(tensors[name].shape) if name in tensors else "missing"
        wanted_shape = list(expected[name]) if name in expected else "no such tensor"
        if found_shape != wanted_shape:
            raise UserError(
                f"drafter {path}: tensor {name} is {found_shape}, the target's drafter has {wanted_shape}; "
                "train a drafter for this model with tlt drafter train"
            )
    return StoredDrafter(config, tensors, described.get("tlt") or {})


def choose_preset(name: str | None, drafter: StoredDrafter, changes: Mapping[str, Any] | None = None) -> Preset:
    """The preset asked for, or else the one that the drafter was trained with, with `changes` to its constants; UserError
    when it is for another form."""
    method = drafter.config.method
    preset = PRESETS[name or drafter.about.get("preset") or DEFAULT_PRESET[method]]
    if preset.method != method:
        fitting = " or ".join(key for key, value in PRESETS.items() if value.method == method)
        raise UserError(f"drafter.preset: {name} does not train a drafter of form {method}; give {fitting}")
    preset = dataclasses.replace(preset, **{key: value for key, value in (changes or {}).items() if value is not None})
    if preset.feature_weight and method == "eagle3":
        raise UserError(f"drafter.feature_weight: {preset.feature_weight} has no meaning for eagle3; leave it out")
    return preset


def read_config(path: Path, described: Mapping[str, Any], target: ModelConfig, owns_head: bool) -> DraftConfig:
    """The drafter's shape from its config.json; what must agree with the target is checked."""
    found = described.get("architectures")
    method = ARCHITECTURES.get(found[0]) if isinstance(found, list) and len(found) == 1 else None
    if method is None:
        raise UserError(f"drafter {path}: architectures is {found}; only {list(ARCHITECTURES)} can be loaded")
    as_llama = {**described, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    layer = parse_config(as_llama, f"drafter {path}")
    for key in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(layer, key), getattr(target, key)
        if theirs != ours:
            raise UserError(f"drafter {path}: {key} is {theirs}, the target's is {ours}; train a drafter for this model")
    vocab = described.get("draft_vocab_size") or target.vocab_size
    config = drafter_config(target, method, vocab)
    capture = described.get("eagle_aux_hidden_state_layer_ids") or config.capture
    layer = dataclasses.replace(layer, num_layers=1, tie_embeddings=True, max_positions=target.max_positions)
    return dataclasses.replace(config, layer=layer, capture=tuple(capture), owns_head=owns_head)
