"""LoRA adapters in PEFT's layout. PEFT's names are ours after `base_model.model.`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.base.config.lora import LoraSection
from tlt.base.io.files import replace_folder
from tlt.base.kinds import shorten
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig
from tlt.models.hf.files import ADAPTER_FILES, existing_directory, read_json, write_hf_json
from tlt.models.hf.weights import StoredTensors, is_finite, save_tensors
from tlt.models.lora import adapter_shapes, is_of_adapter

CONFIG, WEIGHTS = ADAPTER_FILES
PREFIX = "base_model.model."
_PLAIN: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_qalora": False,
}
"""Supported values of PEFT's settings, and their defaults."""
_MUST_BE_EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""init_lora_weights that subtract the start from the base: without PEFT's conversion the adapter belongs to
another base."""


# ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────


def save_adapter(
    path: Path, lora: LoraSection, tensors: Mapping[str, Tensor], base: str, revision: str | None
) -> None:
    """For `peft.PeftModel.from_pretrained(base, path)`. tensors: by our names. revision: the base's commit on
    the hub."""
    with replace_folder(path, ADAPTER_FILES) as new:
        save_tensors(new / WEIGHTS, {PREFIX + name: tensor for name, tensor in tensors.items()})
        write_hf_json(new / CONFIG, adapter_config(lora, base, revision))


def adapter_config(lora: LoraSection, base: str, revision: str | None) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


# ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Adapter:
    lora: LoraSection
    tensors: Mapping[str, Tensor]
    """The adapter's tensors in float32, by our names."""
    without: str | None = None
    """A matrix without adapter though others of its kind have one, or None."""


def read_adapter(path: Path, config: ModelConfig) -> Adapter:
    """The tensors' names tell what the adapter adapts: PEFT's target_modules may be a pattern. UserError for
    another kind of adapter, or another model's."""
    folder = existing_directory(path)
    said, file = read_json(folder / CONFIG), folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: is no readable safetensors file ({error}); give a folder that PEFT has saved"
        ) from None
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in stored.items()}
    matrices = {name.rpartition(".lora_")[0] for name in tensors if is_of_adapter(name)}
    if not matrices:
        raise UserError(f"{file}: holds no matrix of LoRA; give a folder that PEFT has saved")
    targets = tuple(sorted({name.rpartition(".")[2] for name in matrices}))
    lora = _read_lora(folder / CONFIG, said, targets)
    expected = _expected_shapes(file, config, lora)
    without = sorted({name.rpartition(".lora_")[0] for name in expected} - matrices)
    if _may_leave_out(folder / CONFIG, said):
        expected = {
            name: shape for name, shape in expected.items() if name.rpartition(".lora_")[0] in matrices
        }
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        found = "missing" if wrong[0] in expected else "none of an adapter of the model"
        raise UserError(f"{file}: tensor {wrong[0]} is {found}; give an adapter of this model")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = f"has shape {list(tensors[name].shape)} where the model needs {list(shape)}"
            raise UserError(f"{file}: tensor {name} {found}; give an adapter of this model")
        if not is_finite(tensors[name]):
            raise UserError(f"{file}: tensor {name} holds NaN or infinite values; give another adapter")
    return Adapter(lora, tensors, without[0] if without else None)


def _expected_shapes(file: Path, config: ModelConfig, lora: LoraSection) -> dict[str, torch.Size]:
    try:
        return adapter_shapes(config, lora)
    except UserError as error:
        reason = str(error).partition(": ")[2].partition("; ")[0]
        raise UserError(f"{file}: {reason}; give an adapter of this model") from None


def _may_leave_out(file: Path, said: Mapping[str, Any]) -> bool:
    """Whether only some matrices of a kind may be adapted: by a pattern, paths or layers."""
    given = said.get("target_modules")
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return any("." in name for name in given) or said.get("layers_to_transform") is not None
    if isinstance(given, str | None):
        return given != "all-linear"
    raise UserError(f"{file}: target_modules is {shorten(given)}; it must be a text or a list of texts")


def _read_lora(file: Path, said: Mapping[str, Any], targets: tuple[str, ...]) -> LoraSection:
    kind = said.get("peft_type")
    other = [f"{key} {said[key]!r}" for key, plain in _PLAIN.items() if said.get(key, plain) != plain]
    other += [key for key in _MUST_BE_EMPTY if said.get(key)]
    if str(start := said.get("init_lora_weights")).startswith(_CHANGES_THE_BASE):
        other.append(f"init_lora_weights {start!r}")
    if kind != "LORA" or other:
        what = other[0] if kind == "LORA" else f"peft_type {kind!r}"
        raise UserError(
            f"{file}: {what} is not read; give a plain LoRA adapter, or merge it with PEFT (merge_and_unload)"
        )
    try:
        rank, alpha, rslora = said["r"], float(said["lora_alpha"]), said.get("use_rslora", False)
        return LoraSection(rank=rank, alpha=alpha, rslora=rslora, targets=targets)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file}: r, lora_alpha or use_rslora cannot be read ({reason}); save the adapter again"
        ) from None


class AdaptedTensors(StoredTensors):
    """An adapter is merged into each tensor as it is read."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype | None, adapter: Adapter) -> None:
        self._adapter = adapter  # first, because the base may read tensors
        super().__init__(path, config, dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        stored, layer = super().rows(name, rows), name.removesuffix(".weight")
        a_RI, b_OR = (self._adapter.tensors.get(f"{layer}.lora_{part}.weight") for part in "AB")
        if a_RI is None or b_OR is None:
            return stored
        wide, scale = torch.promote_types(stored.dtype, torch.float32), self._adapter.lora.scale
        merged = torch.addmm(stored.to(wide), b_OR[rows].to(wide), a_RI.to(wide), alpha=scale)
        return merged.to(stored.dtype)
