"""Hugging Face checkpoint folders: safetensors ↔ tensors by name.

DIR/config.json ─── config.py ──▶ ModelConfig ── expected_shapes ──▶ {name: shape} ──┐
DIR/model*.safetensors ──────────────────── header check ◀───────────────────────────┘──▶ {name: tensor}
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt.base.io.files import matches, replace_folder, set_usual_mode
from tlt.base.io.hub import COMPANIONS
from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.hf.config import TOKEN_IDS, config_to_hf, parse_config
from tlt.models.hf.conversion import Sources, conversion_of
from tlt.models.hf.files import CHECKPOINT_FILES, INDEX, WEIGHTS, existing_directory, read_json, write_hf_json
from tlt.models.hf.text_part import MODULE, NEWEST, in_layout, layout_of, renamed
from tlt.models.new import new_transformer

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported number formats, by their safetensors names; any other is a quantization."""


# ── tensors in ──────────────────────────────────────────────────────────────────────────────────────────────


def expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """In the order of the layers. Allocates nothing."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in new_transformer(config).state_dict().items()}


@lru_cache
def count_parameters(config: ModelConfig) -> int:
    return sum(shape.numel() for shape in expected_shapes(config).values())


@lru_cache
def largest_tensor(config: ModelConfig) -> int:
    return max(shape.numel() for shape in expected_shapes(config).values())


def load_tensors(
    path: Path | str, config: ModelConfig, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    return dict(StoredTensors(path, config, dtype))


class StoredTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors on the CPU, read on access, as `dtype` (None: as stored).

    Names and shapes are `expected_shapes(config)`. Raises UserError at once unless all are there, and on
    access for values not finite as `dtype`. Two kinds of surplus are dropped: `SameNames.is_left_out`
    (conversion.py), and a tied checkpoint's `lm_head.weight` if it equals the embedding.
    """

    def __init__(self, path: Path | str, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        directory = existing_directory(path)
        files = _weight_files(directory)
        self._stored, self._dtype = _stored_tensors(files), dtype
        expected = expected_shapes(config)
        self._names = list(expected)
        self._conversion = conversion_of(config)
        found, is_left_out = self._conversion.sources(self._stored), self._conversion.is_left_out
        self._sources = {name: of for name, of in found.items() if name in expected or not is_left_out(name)}
        has_tied_head = config.tie_embeddings and "lm_head.weight" in self._sources
        if has_tied_head:
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        place = files[0] if len(files) == 1 else directory / INDEX
        _check_stored(self._stored, self._sources, expected, config, place)
        if has_tied_head and not torch.equal(self["lm_head.weight"], self["model.embed_tokens.weight"]):
            head = self._stored[self._sources["lm_head.weight"].names[0]]
            raise UserError(
                f"{head.file}: tensor lm_head.weight differs from model.embed_tokens.weight although "
                f"tie_word_embeddings is true; set it to false in {directory / 'config.json'} to keep both"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, slice(None))

    def rows(self, name: str, rows: slice) -> Tensor:
        sources = self._sources[name]
        if sources.is_alone:
            return self._read(sources.names[0], rows)
        return self._conversion.to_module(name, sources, self._read)[rows]

    def _read(self, name: str, rows: slice = slice(None)) -> Tensor:
        file = self._stored[name].file
        with safe_open(file, framework="pt") as opened:
            whole = rows == slice(None)  # a tensor without axes has no slice
            tensor: Tensor = opened.get_tensor(name) if whole else opened.get_slice(name)[rows]
        tensor = tensor if self._dtype is None else tensor.to(self._dtype)
        _check_finite(tensor, name, file)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the mixin would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def stored_dtype(path: Path | str) -> torch.dtype:
    stored = _stored_tensors(_weight_files(existing_directory(path))).values()
    sizes = {name: sum(t.shape.numel() for t in stored if t.dtype == name) for name in STORED_DTYPES}
    return STORED_DTYPES[max(sizes, key=sizes.__getitem__)]


def is_finite(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # NaN and infinity reach the smallest or largest value; isfinite().all() takes 20 times as long on a CPU
    return torch.stack(tensor.aminmax()).isfinite().all()


def _check_finite(tensor: Tensor, name: str, file: Path) -> None:
    if not is_finite(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        remedy = "download the checkpoint again, or use one from before its training diverged"
        raise UserError(f"{file}: tensor {name} holds NaN or infinite values as {dtype}; {remedy}")


def stored_names(path: Path | str) -> list[str]:
    return list(_stored_tensors(_weight_files(existing_directory(path))))


def read_safetensors(path: Path | str) -> dict[str, Tensor]:
    """Reads all tensors as stored, without checks."""
    directory = existing_directory(path)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            # a handle is no mapping
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
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
        for name in shards.values():
            if not isinstance(name, str) or name != Path(name).name:
                remedy = "which is no file beside it; download the file again"
                raise UserError(f"{directory / INDEX}: weight_map names {name!r}, {remedy}")
        files = [directory / name for name in sorted(set(shards.values()))]
        for file in files:
            if not os.path.exists(file):  # Path.exists raises for a name that is too long
                remedy = f"download it into {directory}"
                raise UserError(f"{directory / INDEX}: shard {file.name} is missing; {remedy}")
        return files
    if pickled := sorted(directory.glob("*.bin")):
        raise UserError(
            f"{directory}: holds {pickled[0].name} but no safetensors; convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER_DIR)"
        )
    remedy = "give a folder with a whole checkpoint"
    raise UserError(f"{directory}: holds neither {WEIGHTS} nor {INDEX}; {remedy}")


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
        except (SafetensorError, OSError) as error:  # the error names no file
            remedy = "download it again (or run git lfs pull)"
            raise UserError(f"{file}: is no readable safetensors file ({error}); {remedy}") from error
    return stored


def _check_stored(
    stored: dict[str, _Stored],
    sources: Mapping[str, Sources],
    expected: dict[str, torch.Size],
    config: ModelConfig,
    place: Path,
) -> None:
    if missing := [name for name in expected if name not in sources]:
        remedy = "download the checkpoint again, or correct config.json if it belongs to another model"
        raise UserError(f"{place}: {_listed(missing)} is missing; {remedy}")
    if surplus := sorted(sources.keys() - expected.keys()):
        described = f"a {config.architecture} model of {config.num_layers} layers"
        remedy = f"config.json describes {described} without it; correct one of the two"
        names = [name for target in surplus for name in sources[target].names]
        raise UserError(f"{stored[names[0]].file}: {_listed(names)} is unknown; {remedy}")
    for name, shape in expected.items():
        parts = [stored[part] for part in sources[name].names]
        first, found = parts[0], parts[0].shape
        if sources[name].is_alone:
            is_fitting = found == shape
        else:
            is_fitting = sum(part.shape.numel() for part in parts) == shape.numel()
        if not is_fitting:
            wrong, asked = sources[name].names, list(shape)
            raise UserError(
                f"{first.file}: {_listed(wrong)} has shape {list(found)}; config.json asks for {asked}"
                "; use the config.json that belongs to these weights"
            )
    needed = [part for name in expected for part in sources[name].names]
    if quantized := [name for name in needed if stored[name].dtype not in STORED_DTYPES]:
        first = stored[quantized[0]]
        remedy = f"use an unquantized checkpoint ({', '.join(STORED_DTYPES)})"
        raise UserError(f"{first.file}: {_listed(quantized)} has dtype {first.dtype}; {remedy}")


def _listed(names: Sequence[str]) -> str:
    return f"tensor {names[0]}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


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
    """Writes a checkpoint whole or not at all. One writer at a time.

    tensors: a lazy mapping is read one shard at a time.
    source: the original checkpoint, whose tokenizer, chat template, generation config and unchanged keys of
        config.json are copied; None: nothing is.

    Raises UserError for a folder that holds anything but a checkpoint, and for weights that are not finite.
    """
    target = Path(path).resolve()
    origin = None if source is None else existing_directory(source)
    with replace_folder(target, CHECKPOINT_FILES) as new:
        carried = None
        if config.is_text_part:
            assert origin is not None, "the rest of the checkpoint comes from the original"
            carried = Carried(origin)
        _write_tensors(new, config, tensors, dtype, max_shard_bytes, carried)
        write_hf_json(new / "config.json", _described(origin, config, dtype, extra or {}))
        if origin is not None:
            _copy_companions(origin, new)


def _described(
    origin: Path | None, config: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any]
) -> dict[str, Any]:
    file = None if origin is None else origin / "config.json"
    known = read_json(file) if file is not None and file.exists() else {}
    if isinstance(config, AnyConfig) and not config.is_text_part:
        known = json.loads(config.raw)
    elif not config.is_text_part and not _describes(known, config):
        ids = {key: known[key] for key in TOKEN_IDS if key in known}
        return config_to_hf(config, dtype, ids | dict(extra))
    kept = {key: value for key, value in known.items() if not key.startswith("tlt_")}  # an earlier run's
    names = [key for key in ("dtype", "torch_dtype") if key in kept] or ["torch_dtype"]
    return kept | dict.fromkeys(names, str(dtype).removeprefix("torch.")) | dict(extra)


def _describes(known: Mapping[str, Any], config: ModelConfig) -> bool:
    try:
        return parse_config(known, "config.json") == config
    except UserError:  # it may hold token ids alone
        return False


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises OSError, where safetensors has an error of its own."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})  # transformers 4 refuses files without the format
    except SafetensorError as error:
        raise OSError(str(error)) from error
    set_usual_mode(path)  # safetensors creates its files for the owner alone


def plan_shards(shapes: Mapping[str, torch.Size], itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """A shard is consecutive tensors that fit together, or a single larger one."""
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
    carried: Carried | None,
) -> None:
    expected = expected_shapes(config)
    odd = sorted(tensors.keys() ^ expected.keys())
    assert not odd, f"not the tensors of this config: {odd[:3]}"
    shards, conversion = plan_shards(expected, dtype.itemsize, max_shard_bytes), conversion_of(config)
    others = [] if carried is None else plan_shards(carried.shapes, 4, max_shard_bytes)
    num_files, weight_map, total_size = len(shards) + len(others), dict[str, str](), 0
    for number, names in enumerate([*shards, *others], start=1):
        file = WEIGHTS if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"
        if carried is not None and number > len(shards):
            stored = {name: carried[name] for name in names}
            save_tensors(directory / file, stored)
            weight_map |= dict.fromkeys(stored, file)
            total_size += sum(tensor.nbytes for tensor in stored.values())
            continue
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        for name, tensor in shard.items():
            if not is_finite(tensor):
                remedy = "save weights that are finite"
                raise UserError(f"tensor {name} holds NaN or infinite values, and is not written; {remedy}")
            assert tensor.shape == expected[name], f"{name}: {tensor.shape}, not {expected[name]}"
        stored = conversion.to_checkpoint(shard)
        if carried is not None:
            stored = in_layout(stored, carried.layout, NEWEST)
        save_tensors(directory / file, stored)
        weight_map |= dict.fromkeys(stored, file)
        total_size += sum(tensor.nbytes for tensor in stored.values())
    if num_files > 1:
        write_hf_json(directory / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


class Carried(Mapping[str, Tensor]):
    """The tensors outside the text part, as stored, read on access."""

    def __init__(self, origin: Path) -> None:
        stored = _stored_tensors(_weight_files(origin))
        self.layout = layout_of(stored)
        self._stored = {
            name: one for name, one in stored.items() if renamed(name, self.layout, MODULE) is None
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._stored[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _copy_companions(origin: Path, directory: Path) -> None:
    for entry in sorted(origin.iterdir()):
        if matches(entry.name, COMPANIONS):
            (shutil.copytree if entry.is_dir() else shutil.copyfile)(entry, directory / entry.name)


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)])  # it fixes the number of bytes
        digest.update(header.encode() + b"\n")
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
