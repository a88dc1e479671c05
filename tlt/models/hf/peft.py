"""LoRA adapters in PEFT's layout. PEFT's names are ours after `base_model.model.`, but for experts' tensors,
which PEFT wraps into each other (its target_parameters):

    mlp.experts.gate_up_proj_lora.lora_A.weight     PEFT: mlp.experts.base_layer.lora_A.weight
    mlp.experts.down_proj_lora.lora_A.weight        PEFT: mlp.experts.lora_A.weight

Adapters of single experts, as transformers 4 named them (mlp.experts.3.up_proj), are merged only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.base.config.lora import LoraSection
from tlt.base.io.files import replace_folder
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.hf.conversion import conversion_of
from tlt.models.hf.files import ADAPTER_FILES, existing_directory, read_json, write_hf_json
from tlt.models.hf.text_part import MODULE, NESTED, NEWEST, layout_of, renamed
from tlt.models.hf.weights import StoredTensors, expected_shapes, is_finite, save_tensors
from tlt.models.lora import (
    OF_EXPERTS,
    adapted,
    adapted_on_meta,
    adapter_shapes,
    is_of_adapter,
    prefix_of,
    targets_of,
    targets_of_experts,
)

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")

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
    path: Path,
    config: ModelConfig,
    lora: LoraSection,
    tensors: Mapping[str, Tensor],
    base: str,
    revision: str | None,
) -> None:
    """For `peft.PeftModel.from_pretrained(base, path)`. revision: the base's commit on the hub."""
    with replace_folder(path, ADAPTER_FILES) as new:
        names = peft_names(tensors)
        if config.is_text_part:
            whole = NESTED if isinstance(config, AnyConfig) and config.family == "llama4_text" else NEWEST
            names = {name: str(renamed(theirs, MODULE, whole)) for name, theirs in names.items()}
        save_tensors(new / WEIGHTS, {PREFIX + names[name]: tensor for name, tensor in tensors.items()})
        write_hf_json(new / CONFIG, adapter_config(config, lora, base, revision))


def peft_names(names: Iterable[str]) -> dict[str, str]:
    """By our names, all of a model. A module's first tensor is wrapped innermost."""
    found, depth = {}, Counter[str]()
    for name in reversed(list(names)):
        path, dot, part = name.rpartition(f"{OF_EXPERTS}.")
        if dot:
            experts = path.rpartition(".")[0]
            found[name] = f"{experts}{'.base_layer' * depth[experts + part]}.{part}"
            depth[experts + part] += 1
        else:
            found[name] = name
    return found


def adapter_config(
    config: ModelConfig, lora: LoraSection, base: str, revision: str | None
) -> dict[str, object]:
    kinds, has_experts = targets_of(config, lora), bool(targets_of_experts(config))
    # PEFT takes these in target_modules for single experts' matrices
    as_parameters = {kind: f"{kind}.weight" for kind in ("gate_proj", "up_proj", "down_proj") if has_experts}
    parameters = [as_parameters.get(kind, kind) for kind in kinds if "." in kind or kind in as_parameters]
    modules: list[str] | str = [kind for kind in kinds if "." not in kind and kind not in as_parameters]
    if config.is_text_part:  # what reads images may have matrices of the same names
        modules = rf".*language_model\..*\.({'|'.join(modules)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
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
    untrainable: str | None = None
    """Why a run that trains adapters cannot train on, as "FOLDER …" goes on."""


def read_adapter(path: Path, config: ModelConfig) -> Adapter:
    """The tensors' names tell what the adapter adapts: PEFT's target_modules may be a pattern. Raises
    UserError for another kind of adapter, or another model's."""
    folder = existing_directory(path)
    said, file = read_json(folder / CONFIG), folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: is no readable safetensors file ({error}); give a folder that PEFT has saved"
        ) from None
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in stored.items()}
    if config.is_text_part:
        layout = layout_of(tensors)
        tensors = {renamed(name, layout, MODULE) or name: tensor for name, tensor in tensors.items()}
    matrices = {name.rpartition(".lora_")[0] for name in tensors if is_of_adapter(name)}
    if not matrices:
        raise UserError(f"{file}: holds no matrix of LoRA; give a folder that PEFT has saved")
    single = {name for name in matrices if _OF_ONE_EXPERT.search(name)}
    lora = _read_lora(folder / CONFIG, said, _targets(matrices - single, said, config))
    expected = _expected_shapes(file, config, lora)
    ours = {theirs: name for name, theirs in peft_names(expected).items()}
    tensors = {ours.get(name, name): tensor for name, tensor in tensors.items()}
    matrices = {name.rpartition(".lora_")[0] for name in tensors}
    without = sorted({name.rpartition(".lora_")[0] for name in expected} - matrices)
    if _may_leave_out(folder / CONFIG, said) or single:
        expected = {
            name: shape for name, shape in expected.items() if name.rpartition(".lora_")[0] in matrices
        }
    if single:
        expected |= _shapes_of_experts(config, lora.rank, single)
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        found = "missing" if wrong[0] in expected else "none of an adapter of the model"
        raise UserError(f"{file}: tensor {wrong[0]} is {found}; give an adapter of this model")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = f"has shape {list(tensors[name].shape)} where the model needs {list(shape)}"
            raise UserError(f"{file}: tensor {name} {found}; give an adapter of this model")
        if not is_finite(tensors[name]):
            raise UserError(f"{file}: tensor {name} holds NaN or infinite values; give another adapter")
    untrainable = f"does not adapt {without[0]}, as a run that trains adapters does" if without else None
    if single:
        untrainable = "adapts single experts, which are trained in one tensor"
    return Adapter(lora, tensors, untrainable)


def _shapes_of_experts(config: ModelConfig, rank: int, paths: Iterable[str]) -> dict[str, torch.Size]:
    fused = {name: torch.empty(shape, device="meta") for name, shape in expected_shapes(config).items()}
    matrices = conversion_of(config).to_checkpoint(fused)
    found = {}
    for path in paths:
        if (matrix := matrices.get(f"{path}.weight")) is not None:
            found[f"{path}.lora_A.weight"] = torch.Size((rank, matrix.shape[1]))
            found[f"{path}.lora_B.weight"] = torch.Size((matrix.shape[0], rank))
    return found


def _targets(matrices: set[str], said: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    kinds, experts = {name.rpartition(".")[2] for name in matrices}, targets_of_experts(config)
    wrapped = kinds & {"base_layer", *(kind.partition(".")[0] for kind in experts)}
    if "base_layer" not in wrapped:  # one tensor of the experts alone
        given = {str(name).rpartition(".")[2] for name in said.get("target_parameters") or ()}
        experts = tuple(kind for kind in experts if kind.partition(".")[2] in given)
    named = {*(kinds - wrapped), *(experts if wrapped else ())}
    return tuple(sorted(named)) or targets_of(config, LoraSection(rank=1))[:1]  # single experts alone


def _expected_shapes(file: Path, config: ModelConfig, lora: LoraSection) -> dict[str, torch.Size]:
    try:
        return adapter_shapes(config, lora)
    except UserError as error:
        reason = str(error).partition(": ")[2].partition("; ")[0]
        raise UserError(f"{file}: {reason}; give an adapter of this model") from None


def _may_leave_out(file: Path, said: Mapping[str, Any]) -> bool:
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
        self._layers = adapted(adapted_on_meta(config, adapter.lora))
        super().__init__(path, config, dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        stored = super().rows(name, rows)
        return self._merged(stored, name, rows, self._layers[name].sum) if name in self._layers else stored

    def _read(self, name: str, rows: slice = slice(None)) -> Tensor:
        stored, scale = super()._read(name, rows), self._adapter.lora.scale
        if not _OF_ONE_EXPERT.search(name):
            return stored
        return self._merged(stored, name, rows, lambda w, a, b, rows: torch.addmm(w, b[rows], a, alpha=scale))

    def _merged(self, stored: Tensor, name: str, rows: slice, sum: Callable[..., Tensor]) -> Tensor:
        a, b = (self._adapter.tensors.get(f"{prefix_of(name)}lora_{part}.weight") for part in "AB")
        if a is None or b is None:
            return stored
        wide = torch.promote_types(stored.dtype, torch.float32)
        return sum(stored.to(wide), a.to(wide), b.to(wide), rows).to(stored.dtype)
