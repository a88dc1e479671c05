"""Hugging Face checkpoint folders: safetensors ↔ tensors by name, and a content hash of them.

Our names are the checkpoint's names, so nothing is renamed here. What this file adds is the refusal: tensors
that are not exactly those of config.json end in one line that says which file, which tensor and what to do.
It knows neither engines nor
ranks: sharded trainers hand in whole tensors, one at a time if `tensors` is a lazy mapping.

    DIR/config.json ── hf_config.py ──▶ ModelConfig ── expected_shapes ──▶ {name: shape} ──┐
    DIR/model*.safetensors ───────────────────── header check ◀────────────────────────────┘──▶ {name: tensor}
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt.hf.config import TOKEN_IDS, config_to_hf
from tlt.hf.files import existing_directory, read_json, write_json
from tlt.io.files import replace_folder
from tlt.io.hub import COMPANIONS
from tlt.models.decoder import ModelConfig, Transformer
from tlt.types import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

STORED_DTYPES = ("F64", "F32", "F16", "BF16")
"""Number formats, by their safetensors names, in which weights may be stored; any other is a quantization."""


# ── tensors in ──────────────────────────────────────────────────────────────────────────────────────────────


def expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Returns the shape of every tensor of a checkpoint by its name, in the order of the layers. Allocates
    nothing."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Transformer(config).state_dict().items()}


def load_tensors(
    path: Path | str, config: ModelConfig, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns all tensors of the checkpoint in `path`, on the CPU, as `dtype` (None: as stored); see
    StoredTensors."""
    return dict(StoredTensors(path, config, dtype))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, on the CPU, as `dtype` (None: as stored), each read when it is
    asked for.

    Names and shapes are checked against `expected_shapes(config)` before anything is read. Two kinds of
    surplus are let through and dropped: rotary `inv_freq` buffers, which old versions of transformers
    stored, and the `lm_head.weight` of a tied checkpoint if it equals the embedding. Everything else
    missing, surplus or misshapen is a UserError, and so is, when it is read, a tensor with values that are
    not finite as `dtype`.
    """

    def __init__(self, path: Path | str, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        directory = existing_directory(path)
        files = _weight_files(directory)
        self._stored, self._dtype = _stored_tensors(files), dtype
        expected = expected_shapes(config)
        self._names = list(expected)
        has_tied_head = config.tie_embeddings and "lm_head.weight" in self._stored
        if has_tied_head:
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        _check_stored(
            self._stored, expected, config, place=files[0] if len(files) == 1 else directory / INDEX
        )
        if has_tied_head and not torch.equal(self["lm_head.weight"], self["model.embed_tokens.weight"]):
            raise UserError(
                f"{self._stored['lm_head.weight'].file}: tensor lm_head.weight differs from "
                "model.embed_tokens.weight although "
                f"tie_word_embeddings is true; set it to false in {directory / 'config.json'} to keep both"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, slice(None))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Reads these rows (of dimension 0) alone."""
        file = self._stored[name].file
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_slice(name)[rows]
        tensor = tensor if self._dtype is None else tensor.to(self._dtype)
        _check_finite(tensor, name, file)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_finite(tensor: Tensor) -> Tensor:
    """Returns whether all values are finite, a bool that is still on the tensor's device."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # NaN and infinity both reach the smallest or the largest value; isfinite().all() takes twenty times as
    # long on a CPU.
    return torch.stack(tensor.aminmax()).isfinite().all()


def _check_finite(tensor: Tensor, name: str, file: Path) -> None:
    if not is_finite(tensor):
        place = f"{file}: tensor {name} holds NaN or infinite values as {str(tensor.dtype).removeprefix('torch.')}"
        raise UserError(
            f"{place}; download the checkpoint again, or use one from before its training diverged"
        )


def load_stored(path: Path | str) -> dict[str, Tensor]:
    """Returns all tensors of the safetensors in `path`, whole or in shards, as stored. Only the files are
    checked: names, shapes and values are left to the caller."""
    directory = existing_directory(path)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # a handle is no mapping
    return tensors


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: torch.Size
    dtype: str


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if (directory / INDEX).exists():
        shards = read_json(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UserError(f"{directory / INDEX}: weight_map is missing or empty; download the file again")
        if strange := [
            name for name in shards.values() if not isinstance(name, str) or name != Path(name).name
        ]:
            remedy = "which is no file beside it; download the file again"
            raise UserError(f"{directory / INDEX}: weight_map names {strange[0]!r}, {remedy}")
        files = [directory / name for name in sorted(set(shards.values()))]
        for file in files:
            if not os.path.exists(file):  # Path.exists raises for a name that is too long
                raise UserError(
                    f"{directory / INDEX}: shard {file.name} is missing; download it into {directory}"
                )
        return files
    pickled = sorted(directory.glob("*.bin"))
    if pickled:
        raise UserError(
            f"{directory}: holds {pickled[0].name} but no safetensors; convert it once with "
            f"transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER_DIR)"
        )
    raise UserError(
        f"{directory}: holds neither {WEIGHTS} nor {INDEX}; give a folder with a whole checkpoint"
    )


def _stored_tensors(files: list[Path]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # a safetensors handle is no mapping
                    if name in stored:
                        raise UserError(
                            f"{file}: tensor {name} is also in {stored[name].file.name}; keep one of the two"
                        )
                    header = opened.get_slice(name)
                    stored[name] = _Stored(file, torch.Size(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:  # names no file by itself
            remedy = "download it again (or run git lfs pull)"
            raise UserError(f"{file}: is no readable safetensors file ({error}); {remedy}") from error
    return stored


def _check_stored(
    stored: dict[str, _Stored], expected: dict[str, torch.Size], config: ModelConfig, place: Path
) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        remedy = "download the checkpoint again, or correct config.json if it belongs to another model"
        raise UserError(f"{place}: tensor {missing[0]}{_and_more(missing)} is missing; {remedy}")
    surplus = sorted(
        name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq")
    )
    if surplus:
        described = f"a {config.architecture} model of {config.num_layers} layers"
        remedy = f"config.json describes {described} without it; correct one of the two"
        raise UserError(
            f"{stored[surplus[0]].file}: tensor {surplus[0]}{_and_more(surplus)} is unknown; {remedy}"
        )
    misshapen = [name for name in expected if stored[name].shape != expected[name]]
    if misshapen:
        first = stored[misshapen[0]]
        remedy = f"config.json asks for {list(expected[misshapen[0]])}; use the config.json that belongs to these weights"
        raise UserError(
            f"{first.file}: tensor {misshapen[0]}{_and_more(misshapen)} has shape {list(first.shape)}; "
            f"{remedy}"
        )
    coded = [name for name in expected if stored[name].dtype not in STORED_DTYPES]
    if coded:
        first = stored[coded[0]]
        remedy = f"use an unquantized checkpoint ({', '.join(STORED_DTYPES)})"
        raise UserError(
            f"{first.file}: tensor {coded[0]}{_and_more(coded)} has dtype {first.dtype}; {remedy}"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# ── tensors out ─────────────────────────────────────────────────────────────────────────────────────────────


def save_model(
    path: Path | str,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    source: Path | str | None,
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint that `load_tensors` and transformers load.

    source: the checkpoint this one descends from: its tokenizer, chat template, generation config and token
        ids are copied. None: there is nothing to copy (then give the token ids in `extra`, which adds keys to
        config.json).

    An existing checkpoint is replaced when the new one is complete (see `replace_folder`). A folder that
    holds anything but a checkpoint is refused, and so are weights that are not finite. One writer at a
    time.
    """
    target = Path(path).resolve()
    _check_replaceable(target)
    origin = None if source is None else existing_directory(source)
    token_ids = {}
    if origin is not None and (origin / "config.json").exists():
        token_ids = {
            key: value for key, value in read_json(origin / "config.json").items() if key in TOKEN_IDS
        }

    with replace_folder(target) as new:
        _write_tensors(new, config, tensors, dtype, max_shard_bytes)
        write_json(new / "config.json", config_to_hf(config, dtype, token_ids | dict(extra or {})))
        if origin is not None:
            _copy_companions(origin, new)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file. Raises OSError where it cannot be written, as other writers do, and not
    safetensors' own."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})  # transformers 4 refuses files without the format
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors creates its files for the owner alone


def plan_shards(shapes: Mapping[str, torch.Size], itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """Returns the names of each shard: consecutive ones, as many as fit; a tensor larger than a shard gets
    one of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_tensors(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    expected = expected_shapes(config)
    assert tensors.keys() == expected.keys(), (
        f"not the tensors of this config: {sorted(tensors.keys() ^ expected.keys())[:3]}"
    )
    shards = plan_shards(expected, dtype.itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        for name, tensor in shard.items():
            if not is_finite(tensor):
                raise UserError(
                    f"tensor {name} holds NaN or infinite values, and is not written; save weights that are "
                    "finite"
                )
            assert tensor.shape == expected[name], (
                f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}"
            )
        save_tensors(directory / file, shard)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total_size = sum(shape.numel() for shape in expected.values()) * dtype.itemsize
        write_json(directory / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _copy_companions(origin: Path, directory: Path) -> None:
    for entry in sorted(origin.iterdir()):
        if any(fnmatch.fnmatch(entry.name, pattern) for pattern in COMPANIONS):
            if entry.is_dir():
                shutil.copytree(entry, directory / entry.name)
            else:
                shutil.copyfile(entry, directory / entry.name)


def _check_replaceable(target: Path) -> None:
    """Raises UserError where something else than a checkpoint lies; to replace a folder deletes all that
    is in it."""
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: is a file; give a folder to save the checkpoint in")
    ours = ("config.json", "model*.safetensors", INDEX, *COMPANIONS)
    for entry in sorted(target.iterdir()):
        if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in ours):
            raise UserError(
                f"{target}: holds {entry.name}, which is no part of a checkpoint; give a new or empty folder"
            )


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Returns a SHA-256 (hex) over names, dtypes, shapes and bytes; the order of the mapping does not
    matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(
            json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n"
        )  # fixes the bytes' length
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
