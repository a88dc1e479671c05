"""Reads the model that the user names: a local folder, or a model of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tlt.base.config.engine import Implementation
from tlt.base.config.schema import Config
from tlt.base.io.hub import resolve_description, resolve_model
from tlt.base.types import SamplingParams, UserError
from tlt.engine.sequence import Decode
from tlt.models.decoder import ModelConfig
from tlt.models.hf.config import OtherComputation
from tlt.models.hf.families import load_model_config
from tlt.models.hf.limits import Limits, read_limits
from tlt.models.hf.peft import AdaptedTensors, Adapter, read_adapter
from tlt.models.hf.tokenizer import Tokenizer, check_stop_ids, has_tokenizer, load_tokenizer, read_stop_ids
from tlt.models.hf.weights import StoredTensors
from tlt.models.lora import targets_of


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint folder without its weights, for an engine that loads them itself.

    config: bounds of token ids and positions.
    tokenizer: None: prompts must be token ids.
    """

    path: Path
    config: Limits
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]

    @property
    def decode(self) -> Decode | None:
        return None if self.tokenizer is None else self.tokenizer.decode

    def with_ends(self, params: SamplingParams, place: str = "stop") -> SamplingParams:
        """Replaces stop texts that are special tokens by ids. Raises UserError, beginning with `place`, for
        ends that no response can have."""
        if self.tokenizer is not None:
            return self.tokenizer.with_ends(params, place)
        check_stop_ids(params, self.config.vocab_size, place)
        return params


@dataclass(frozen=True)
class Model(ModelFolder):
    """A checkpoint of a family that our decoder computes, with weights.

    adapter: to train further; None: there is none, or it is merged into the weights.
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    adapter: Adapter | None = None


def model_folder(config: Config) -> Path:
    return resolve_model(config.model.path)


def adapter_folder(config: Config) -> Path | None:
    return None if config.model.adapter is None else resolve_model(config.model.adapter)


def drafter_folder(config: Config) -> Path | None:
    return None if config.drafter.path is None else resolve_model(config.drafter.path)


def described_model(config: Config) -> ModelConfig:
    """Of config.json alone: weights need not be there."""
    folder = resolve_description(config.model.path)
    return load_model_config(folder, config.model.implementation)


def load_model_for(
    path: Path,
    engine: Literal["tlt", "vllm"],
    adapter: Path | None = None,
    implementation: Implementation = "auto",
) -> ModelFolder:
    """vLLM takes families that are not computed here. Raises UserError for vLLM with an implementation of
    ours."""
    if engine == "vllm" and implementation != "auto":
        what = f"implementation: {implementation} is TLT's, and vLLM computes the model with code of its own"
        raise UserError(f"{what}; leave it out")
    if adapter is not None and engine == "vllm":
        raise UserError(
            f"adapter {adapter}: vLLM reads the model itself; merge the two with PEFT, or leave out engine "
            "vllm"
        )
    try:
        return load_model(path, None, adapter, implementation)
    except OtherComputation:
        if engine == "tlt":
            raise
        return ModelFolder(path, read_limits(path), *_tokens(path))


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    implementation: Implementation = "auto",
) -> Model:
    """dtype: of the tensors; None: as stored.
    adapter: a PEFT folder to merge; UserError where it does not fit.
    """
    model = open_model(path, dtype, adapter, implementation)
    return replace(model, tensors=dict(model.tensors))


def open_model(
    path: Path,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    implementation: Implementation = "auto",
) -> Model:
    """As `load_model`; each tensor is read and checked when looked up."""
    config = load_model_config(path, implementation)
    tokens = _tokens(path)
    if adapter is None:
        return Model(path, config, *tokens, StoredTensors(path, config, dtype))
    adapted = AdaptedTensors(path, config, dtype, read_adapter(adapter, config))
    return Model(path, config, *tokens, adapted)


def open_start(config: Config, dtype: torch.dtype) -> Model:
    """Opens a run's initial policy. An adapter is trained further if the run trains adapters, else merged."""
    folder, adapter = model_folder(config), adapter_folder(config)
    trains_it = adapter is not None and config.lora.is_used
    model = open_model(folder, dtype, None if trains_it else adapter, config.model.implementation)
    if not trains_it:
        return model
    return replace(model, adapter=read_start(config, model.config))


def read_start(config: Config, shape: ModelConfig) -> Adapter | None:
    """Raises UserError where the run trains adapters and `lora` describes another adapter."""
    if (folder := adapter_folder(config)) is None:
        return None
    adapter = read_adapter(folder, shape)
    if config.lora.is_used and adapter.untrainable is not None:
        raise UserError(
            f"model.adapter: {folder} {adapter.untrainable}; train the whole policy with lora.rank 0"
        )
    for key in ("rank", "scale", "targets") if config.lora.is_used else ():
        wanted, found = (
            sorted(targets_of(shape, lora)) if key == "targets" else getattr(lora, key)
            for lora in (config.lora, adapter.lora)
        )
        if wanted != found:
            name = "alpha" if key == "scale" else key
            raise UserError(
                f"lora.{name}: describes another adapter than model.adapter, {folder} (there {key} is "
                f"{found}, not {wanted});"
                " set rank, alpha, rslora and targets as there, or train the whole policy with lora.rank 0"
            )
    return adapter


def _tokens(path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    return tokenizer, tokenizer.stop_ids if tokenizer is not None else read_stop_ids(path)


def resolve_device(wanted: str | torch.device, place: str = "device") -> torch.device:
    """Resolves "auto" to a GPU if there is one. Raises UserError, beginning with `place`."""
    has_cuda = torch.cuda.is_available()
    device = None
    with suppress(RuntimeError, TypeError):
        device = torch.device(("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted)
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"{place}: {wanted!r} is unknown; give auto, cpu or cuda")
    if device.type == "cuda" and not has_cuda:
        raise UserError(f"{place}: {wanted} is not available here; give cpu or auto")
    return device
