"""Drafter directories: config.json and model.safetensors in the layout that vLLM's EAGLE loader reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.models.checkpoint import config_to_hf
from tlt.models.drafter import DraftModel, drafter_config
from tlt.models.transformer import ModelConfig
from tlt.types import UserError

ARCHITECTURE = "EagleLlamaForCausalLM"


def save_drafter(path: Path, model: DraftModel, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> None:
    """Writes the drafter. `about` (what it was trained for and on, the policy's content hash among it) goes under the
    key "tlt" of config.json, which engines ignore."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)  # safetensors creates its files for the owner alone
    described = config_to_hf(model.config, dtype, {"tlt": dict(about or {})})
    described |= {"architectures": [ARCHITECTURE], "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def load_drafter(path: Path | str, target: ModelConfig) -> dict[str, Tensor]:
    """The drafter's tensors, checked against the target it is to draft for: UserError, one line, otherwise."""
    path = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise UserError(f"drafter {path}: {name} is missing; give a directory that tlt drafter train wrote")
    try:
        described = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"drafter {path}: config.json is not valid JSON ({error}); train or copy it again") from None
    if described.get("architectures") != [ARCHITECTURE]:
        found = described.get("architectures")
        raise UserError(f"drafter {path}: architectures is {found}; only [{ARCHITECTURE!r}] can be loaded")
    try:
        tensors = load_file(path / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise UserError(f"drafter {path}: model.safetensors cannot be read ({error}); train or copy it again") from None
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DraftModel(drafter_config(target)).state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found_shape = list(tensors[name].shape) if name in tensors else "missing"
        wanted_shape = list(expected[name]) if name in expected else "no such tensor"
        if found_shape != wanted_shape:
            raise UserError(
                f"drafter {path}: tensor {name} is {found_shape}, the target's drafter has {wanted_shape}; "
                "train a drafter for this model with tlt drafter train"
            )
    return tensors
