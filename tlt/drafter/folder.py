"""Drafter directories: config.json and model.safetensors in the layout that vLLM's EAGLE loaders read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt.drafter.foreign import drop_repeated, read_directory
from tlt.drafter.losses import DEFAULT_PRESET, PRESETS, Preset
from tlt.drafter.model import DraftConfig, DraftModel, Method, drafter_config
from tlt.files import replace_folder
from tlt.models.decoder import ModelConfig
from tlt.models.hf_config import config_to_hf, parse_config
from tlt.types import UserError

ARCHITECTURES: dict[str, Method] = {"EagleLlamaForCausalLM": "eagle", "LlamaForCausalLMEagle3": "eagle3"}


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter as a directory holds it. `about`: what its writer noted of its origin."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    about: Mapping[str, Any]

    @property
    def policy_hash(self) -> str | None:
        """Content hash of the policy it was trained for (a run's last, or tlt drafter train's target); None: not recorded."""
        known: str | None = self.about.get("policy_hash", self.about.get("target"))
        return known


def save_drafter(path: Path, model: DraftModel, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> None:
    """Writes the drafter, whole or not at all; a folder that is there is replaced. `about` (what it was trained for and on, the
    policy's content hash among it) goes under the key "tlt" of config.json, which engines ignore."""
    tensors = {name: _stored(tensor, dtype) for name, tensor in model.state_dict().items()}
    with replace_folder(path) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors creates its files for the owner alone
        (folder / "config.json").write_text(json.dumps(describe(model.config, dtype, about), indent=2) + "\n")


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


def load_drafter(path: Path | str, target: ModelConfig, target_tensors: Mapping[str, Tensor] | None = None) -> StoredDrafter:
    """A drafter, checked against the target it is to draft for: UserError, one line, otherwise.

    Other trainers' directories are read as well (foreign.py). Where they repeat the target's embedding or head, the target's
    own is used; with `target_tensors` the two are compared first.
    """
    path = Path(path)
    described, tensors = read_directory(path)
    tensors = drop_repeated(path, tensors, described["method"], target.vocab_size, target_tensors)
    config = read_config(path, described, target, tensors)
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
        if tensors[name].is_floating_point() and not tensors[name].isfinite().all():
            raise UserError(f"drafter {path}: tensor {name} holds numbers that are not finite; train or copy it again")
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


def read_config(path: Path, described: Mapping[str, Any], target: ModelConfig, tensors: Mapping[str, Tensor]) -> DraftConfig:
    """The drafter's shape from its config.json and what it brought; what must agree with the target is checked."""
    layer = parse_config(described, f"drafter {path}")
    theirs = {"hidden_size": layer.hidden_size, "vocab_size": layer.vocab_size}
    if described.get("target_hidden_size") is not None:
        theirs["target_hidden_size"] = described["target_hidden_size"]
    for key, value in theirs.items():
        ours = getattr(target, key.removeprefix("target_"))
        if value != ours:
            raise UserError(f"drafter {path}: {key} is {value}, the target's is {ours}; train a drafter for this model")
    config = drafter_config(target, described["method"], described.get("draft_vocab_size"))
    capture = tuple(described.get("eagle_aux_hidden_state_layer_ids") or config.capture)
    if list(capture) != sorted(set(capture)) or not 0 <= capture[0] <= capture[-1] <= target.num_layers:
        remedy = f"it must name layers from 0 to {target.num_layers}, rising, so give the model it was trained for"
        raise UserError(f"drafter {path}: eagle_aux_hidden_state_layer_ids is {list(capture)}; {remedy}")
    return dataclasses.replace(
        config,
        layer=dataclasses.replace(layer, num_layers=1, tie_embeddings=True, max_positions=target.max_positions),
        capture=capture,
        owns_head="lm_head.weight" in tensors,
        has_bias="fc.bias" in tensors,
    )
