"""The manifest of a checkpoint, written last: it makes the folder a checkpoint.

manifest.json   {"manifest": {step, ranks, version, run, inputs, counters, files: {name: bytes, SHA-256},
                              tensors: {name: pieces}},
                 "sha256": of the manifest}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tlt.base.io.files import read_file
from tlt.base.io.text import quoted
from tlt.base.types import LAW_VERSION, UserError
from tlt.training.saved.inputs import Inputs
from tlt.training.saved.shards import FileDigest, StoredTensor, digest_of, read_headers

MANIFEST = "manifest.json"
FORMAT = 5
_NAME = re.compile(r"step-(\d{8})")
_FILES = re.compile(r"rank-\d{5}\.(safetensors|json)")


@dataclass(frozen=True)
class Manifest:
    format: int
    step: int
    """Updates done."""
    num_ranks: int
    law: int
    tlt: str
    """Version of the package."""
    run: str
    inputs: Inputs
    counters: dict[str, Any]
    """State besides tensors that all ranks share."""
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]

    @property
    def digest(self) -> str:
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def to_json(self) -> str:
        return _canonical({"manifest": asdict(self), "sha256": self.digest}) + "\n"


_READER = TypeAdapter(Manifest)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


# ── which checkpoints there are ─────────────────────────────────────────────────────────────────────────────


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def all_checkpoints(checkpoints: Path) -> list[Path]:
    """Whole or damaged, newest first."""
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted((path for path in found if step_of(path) is not None), reverse=True)


def latest_checkpoint(checkpoints: Path) -> Path | None:
    return next(iter(all_checkpoints(checkpoints)), None)


# ── reading one ─────────────────────────────────────────────────────────────────────────────────────────────


def read_manifest(path: Path) -> Manifest:
    """Raises UserError for any fault."""
    file = path / MANIFEST
    try:
        text = read_file(file)
    except FileNotFoundError:
        raise damaged(path, MANIFEST, "is missing") from None
    except OSError as error:
        raise damaged(path, MANIFEST, f"cannot be read ({error.strerror})") from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Raises UserError unless it is whole, and this folder's."""
    try:
        described = json.loads(text)
        body, digest = described["manifest"], described["sha256"]
        is_unchanged = hashlib.sha256(_canonical(body).encode()).hexdigest() == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path, MANIFEST, "is no manifest any more") from None
    if not is_unchanged:
        raise damaged(path, MANIFEST, "is not as it was written (its SHA-256 differs)")
    if body.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {body.get('format')!r}, not {FORMAT}; go on with the version of TLT that "
            "wrote it"
        )
    try:
        manifest = _READER.validate_python(body)
    except ValidationError as error:
        raise damaged(
            path, MANIFEST, f"does not describe a checkpoint ({error.errors()[0]['msg']})"
        ) from None
    if manifest.step != step_of(path):
        raise damaged(path, MANIFEST, f"is of step {manifest.step}, which is not this folder's")
    if fault := _contradiction(manifest):
        raise damaged(path, MANIFEST, f"contradicts itself: {fault}")
    if manifest.law != LAW_VERSION:
        raise UserError(
            f"{path}: was sampled by version {manifest.law} of the law, this TLT has version {LAW_VERSION} "
            f"and would draw other tokens; go on with TLT {manifest.tlt}, or start a new run in another "
            "--run.out_dir"
        )
    return manifest


def _contradiction(manifest: Manifest) -> str:
    """Faults in spite of a right digest; empty: none."""
    if strange := [name for name in manifest.files if not _FILES.fullmatch(name)]:
        return f"no checkpoint has a file {strange[0]!r}"
    of_ranks = {f"rank-{rank:05d}.json" for rank in range(manifest.num_ranks)}
    if of_ranks != {name for name in manifest.files if name.endswith(".json")}:
        return f"its files are not those of {manifest.num_ranks} ranks"
    for name, tensor in manifest.tensors.items():
        if not tensor.is_whole or not all(file in manifest.files for file, _, _ in tensor.pieces):
            return f"its pieces do not make up {name}"
    return ""


def verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """UserError for the first missing or damaged file, or one with other pieces."""
    for name in sorted(names):
        expected = manifest.files.get(name)
        if expected is None:
            raise damaged(path, MANIFEST, f"does not name {name}")
        try:
            size = (path / name).stat().st_size
            found = digest_of(path / name) if size == expected.num_bytes else None
        except FileNotFoundError:
            raise damaged(path, name, "is missing") from None
        except OSError as error:
            raise damaged(path, name, f"cannot be read ({error.strerror})") from None
        if found is None:
            raise damaged(path, name, f"has {size:,} bytes, not the {expected.num_bytes:,} that were written")
        if found != expected:
            raise damaged(path, name, "is not as it was written (its SHA-256 differs)")
        if name.endswith(".safetensors"):
            found_pieces = _pieces_in(name, read_headers([path / name]))
            if found_pieces != _pieces_in(name, manifest.tensors):
                raise damaged(path, MANIFEST, f"contradicts {name} about the pieces in it")


def _pieces_in(file: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found = {}
    for name, tensor in tensors.items():
        if pieces := tuple(piece for piece in tensor.pieces if piece[0] == file):
            found[name] = replace(tensor, pieces=pieces)
    return found


def damaged(path: Path, file: str, fault: str) -> UserError:
    older = [other for other in all_checkpoints(path.parent) if other.name < path.name]
    remedy = "start a new run in another --run.out_dir: there is no older checkpoint"
    if older:
        remedy = f"go on from the checkpoint before it: tlt train --resume {quoted(older[0])}"
    return UserError(f"{path / file}: {fault}; bring the file back, or {remedy}")


def describe_state(tensors: Mapping[str, tuple[str, tuple[int, ...]]], manifest: Manifest) -> str:
    """How tensors, name → (dtype, shape), differ from a checkpoint's; empty: not at all."""
    stored = {name: (tensor.code, tensor.shape) for name, tensor in manifest.tensors.items()}
    differing = sorted({name for name, _ in stored.items() ^ tensors.items()})
    if not differing:
        return ""
    name = differing[0]
    kind = name.partition(".")[0].removesuffix("_optimizer")
    if not any(other.startswith(f"{kind}.") for other in stored):
        return f"no {kind}"
    return f"another {kind} ({name}: {_shown(stored.get(name))}, here {_shown(tensors.get(name))})"


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
