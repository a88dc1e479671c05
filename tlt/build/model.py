"""What the user names → what is read: a folder or a name of the hub becomes a model.."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tlt.config.schema import Config
from tlt.distributed.place import find_place
from tlt.engine.sequence import Decode
from tlt.hub import resolve_model
from tlt.models.decoder import ModelConfig
from tlt.models.foreign import Limits, read_limits
from tlt.models.hf_config import OtherComputation, load_model_config
from tlt.models.hf_weights import StoredTensors
from tlt.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, read_stop_ids
from tlt.types import UserError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, as far as it is read for an engine that loads the weights itself.

    config: bounds of token ids and positions.
    tokenizer: None where the folder has none; then prompts have to be token ids.
    """

    path: Path
    config: Limits
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]

    @property
    def decode(self) -> Decode | None:
        """Returns the text of a response's tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode


@dataclass(frozen=True)
class Model(Checkpoint):
    """A checkpoint of a family that our decoder computes, with its weights: trained, drafted for, or generated with."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]


def model_folder(config: Config) -> Path:
    """Returns the local folder of a run's model, which may come from the hub."""
    return resolve_model(config.model.path, config.model.revision)


def drafter_folder(config: Config) -> Path | None:
    """Returns the local folder of a run's drafter, which may come from the hub; None: there is none."""
    return None if config.drafter.path is None else resolve_model(config.drafter.path)


def local_ranks(config: Config) -> int:
    """Returns how many ranks this machine has: who started them says so, and `tlt train` starts all of them here."""
    place = find_place()
    return config.run.num_ranks if place is None else place.local_world_size


def all_ranks(config: Config) -> int:
    """Returns how many ranks all machines have together."""
    place = find_place()
    return config.run.num_ranks if place is None else place.world_size


def load_checkpoint(path: Path, engine: Literal["tlt", "vllm"], dtype: torch.dtype | None = None) -> Checkpoint:
    """Reads what `engine` is to generate with: a Model, or where vLLM is to compute it, a model of whatever family."""
    try:
        return load_model(path, dtype)
    except OtherComputation:
        if engine == "tlt":
            raise
        return Checkpoint(path, read_limits(path), *_tokens(path))


def load_model(path: Path, dtype: torch.dtype | None = None) -> Model:
    """Reads a checkpoint folder. dtype: of the tensors; None: as they are stored. Raises UserError where it cannot be used."""
    model = open_model(path, dtype)
    return replace(model, tensors=dict(model.tensors))


def open_model(path: Path, dtype: torch.dtype | None = None) -> Model:
    """Does the same, but for the tensors: each is read, and its values are checked, when it is asked for."""
    config = load_model_config(path)
    return Model(path, config, *_tokens(path), StoredTensors(path, config, dtype))


def _tokens(path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Returns a folder's tokenizer, if it has one, and the ids that end a response."""
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    return tokenizer, tokenizer.stop_ids if tokenizer is not None else read_stop_ids(path)


def resolve_device(wanted: str | torch.device, place: str = "device") -> torch.device:
    """Returns the device that an engine computes on: for "auto" a GPU where there is one. UserError, which begins with `place`,
    for a device that is unknown or not there. (What `run.device` means for several ranks, distributed/world.py says.)"""
    has_cuda = torch.cuda.is_available()
    device = None
    with suppress(RuntimeError, TypeError):
        device = torch.device(("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted)
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"{place}: {wanted!r} is unknown; give auto, cpu or cuda")
    if device.type == "cuda" and not has_cuda:
        raise UserError(f"{place}: {wanted} is not available here; give cpu or auto")
    return device
