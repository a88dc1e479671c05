"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors, for PEFT, transformers and
vLLM; and read again, to be merged into their model or trained on.

PEFT's names are ours behind `base_model.model.`. Knows neither ranks nor training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.config.lora import LoraSection
from tlt.hf.files import existing_directory, read_json, write_json
from tlt.hf.weights import StoredTensors, is_finite, save_tensors
from tlt.io.files import replace_folder
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.lora import add_adapters
from tlt.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PLAIN: dict[str, Any] = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "lora_bias": False}
"""Settings of PEFT's by which an adapter is what is computed here; those that are not there count as
these."""
_MUST_BE_EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "trainable_token_indices",
)


# ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────


def save_adapter(
    path: Path, lora: LoraSection, tensors: Mapping[str, Tensor], base: str, revision: str | None
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(base, path)` loads; one that was there is
    replaced.

    tensors: of the adapters alone, by our names.
    base, revision: the model that they are for, as a folder or on the hub.
    """
    with replace_folder(path) as new:
        save_tensors(new / WEIGHTS, {PREFIX + name: tensor for name, tensor in tensors.items()})
        write_json(new / CONFIG, adapter_config(lora, base, revision))


def adapter_config(lora: LoraSection, base: str, revision: str | None) -> dict[str, object]:
    """Returns PEFT's LoraConfig of what is trained here."""
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
    """What a folder of PEFT's holds. tensors: by our names, float32."""

    lora: LoraSection
    tensors: Mapping[str, Tensor]


def read_adapter(path: Path, config: ModelConfig) -> Adapter:
    """Reads an adapter for a model of this shape. Raises UserError for one that is no plain LoRA, or
    another model's."""
    folder = existing_directory(path)
    lora = _read_lora(folder / CONFIG, read_json(folder / CONFIG))
    file = folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: is no readable safetensors file ({error}); give a folder that PEFT has saved"
        ) from None
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in stored.items()}
    with torch.device("meta"):
        model = Transformer(config)
    add_adapters(model, lora, torch.float32)
    expected = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        raise UserError(
            f"{file}: tensor {wrong[0]} is {_missing(wrong[0] in expected)}; give an adapter of this model"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = f"has shape {list(tensors[name].shape)} where the model needs {list(shape)}"
            raise UserError(f"{file}: tensor {name} {found}; give an adapter of this model")
        if not is_finite(tensors[name]):
            raise UserError(f"{file}: tensor {name} holds NaN or infinite values; give another adapter")
    return Adapter(lora, tensors)


def _missing(is_expected: bool) -> str:
    return "missing" if is_expected else "none of an adapter of the model"


def _read_lora(file: Path, said: Mapping[str, Any]) -> LoraSection:
    """Returns our keys for PEFT's LoraConfig."""
    kind = said.get("peft_type")
    other = [f"{key} {said[key]!r}" for key, plain in _PLAIN.items() if said.get(key, plain) != plain]
    other += [key for key in _MUST_BE_EMPTY if said.get(key)]
    if kind != "LORA" or other:
        what = other[0] if kind == "LORA" else f"peft_type {kind!r}"
        raise UserError(
            f"{file}: {what} is not read; give a plain LoRA adapter, or merge it with PEFT (merge_and_unload)"
        )
    targets = said.get("target_modules")
    try:
        rank, alpha, rslora = said["r"], float(said["lora_alpha"]), said.get("use_rslora", False)
        return LoraSection(rank=rank, alpha=alpha, rslora=rslora, targets=tuple(targets or ()))
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file}: r, lora_alpha or target_modules cannot be read ({reason}); save the adapter again"
        ) from None


class AdaptedTensors(StoredTensors):
    """The tensors of a checkpoint, each with its adapter merged into it as it is read."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype | None, adapter: Adapter) -> None:
        self._adapter = adapter  # first, for what follows may read
        super().__init__(path, config, dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        stored, layer = super().rows(name, rows), name.removesuffix(".weight")
        a_RI, b_OR = (self._adapter.tensors.get(f"{layer}.lora_{part}.weight") for part in "AB")
        if a_RI is None or b_OR is None:
            return stored
        wide = torch.promote_types(stored.dtype, torch.float32)
        merged = torch.addmm(
            stored.to(wide), b_OR[rows].to(wide), a_RI.to(wide), alpha=self._adapter.lora.scale
        )
        return merged.to(stored.dtype)
