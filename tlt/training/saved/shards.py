"""Tensors of all ranks as safetensors files, each written by one rank and read in slices by any number.

    rank 0   ▏policy.a▕▏policy.b, rows 0 to 7 ▕    ─▶  rank-00000.safetensors
    rank 1   ▏policy.b, rows 8 to 15▕▏policy.c▕    ─▶  rank-00001.safetensors

Replicated tensors are laid end to end and cut into equal stretches of bytes; of sharded ones every rank
writes its shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as torch's checkpoints

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_CHUNK_BYTES = 2**23
"""Large against the cost of a call, small against a tensor."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within a tensor."""


@dataclass(frozen=True)
class TensorPiece:
    """shape: of the whole tensor.
    values: a copy on the CPU.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class FileDigest:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """code: its dtype in safetensors (CODES).
    pieces: (file, offset, shape) of each.
    """

    code: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def is_whole(self) -> bool:
        size = sum(math.prod(shape) for _, _, shape in self.pieces)
        is_within = all(self._holds(offset, shape) for _, offset, shape in self.pieces)
        return is_within and size == math.prod(self.shape)

    def _holds(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        if not len(offset) == len(shape) == len(self.shape):
            return False
        boxes = zip(offset, shape, self.shape, strict=True)
        return all(0 <= start < start + size <= whole for start, size, whole in boxes)


# ── who writes what ─────────────────────────────────────────────────────────────────────────────────────────


def parts_of(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, TensorPiece]:
    """Copies of this rank's shards of DTensors, and of its share of replicated tensors. All ranks pass the
    same names and shapes."""
    shared = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    rows = split_rows({name: (_num_rows(t), t.nbytes) for name, t in shared.items()}, rank, world_size)
    parts: dict[str, TensorPiece] = {}
    for name, tensor in tensors.items():
        local, (offset, _) = local_box(tensor)
        if isinstance(tensor, DTensor):
            is_mine = is_first_copy(tensor)
        elif local.dim():
            first, end = rows[name]
            local, offset, is_mine = local[first:end], (first, *offset[1:]), end > first
        else:
            is_mine = rows[name] == (0, 1)
        if is_mine and local.numel():
            values = torch.empty(local.shape, dtype=local.dtype)  # contiguous, and the only copy
            parts[name] = TensorPiece(tuple(tensor.shape), offset, values.copy_(local.detach()))
    return parts


def split_rows(
    sizes: Mapping[str, tuple[int, int]], rank: int, world_size: int
) -> dict[str, tuple[int, int]]:
    """[first, end) rows of this rank's stretch, of tensors given as (rows, bytes)."""
    ends = list(accumulate(num_bytes for _, num_bytes in sizes.values()))
    borders = [ends[-1] * k // world_size for k in (rank, rank + 1)] if ends else []

    def cut(k: int, start: int, num_rows: int, num_bytes: int) -> int:
        if rank + k in (0, world_size):
            return 0 if rank + k == 0 else num_rows
        return min(max(round((borders[k] - start) * num_rows / max(num_bytes, 1)), 0), num_rows)

    rows = {}
    for (name, (num_rows, num_bytes)), end in zip(sizes.items(), ends, strict=True):
        start = end - num_bytes
        rows[name] = cut(0, start, num_rows, num_bytes), cut(1, start, num_rows, num_bytes)
    return rows


def local_box(tensor: Tensor) -> tuple[Tensor, Box]:
    if not isinstance(tensor, DTensor):
        return tensor, ((0,) * tensor.dim(), tuple(tensor.shape))
    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local.shape), f"a shard of {list(local.shape)} instead of {list(shape)}"
    return local, (tuple(offset), tuple(shape))


def is_first_copy(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh of its own tensor"
    places = zip(tensor.placements, coordinate, strict=True)
    return all(placement.is_shard() or place == 0 for placement, place in places)


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def write_shard(path: Path, parts: Mapping[str, TensorPiece]) -> FileDigest:
    """The metadata place each piece. Raises OSError."""
    # the widest dtypes first, so that each tensor is aligned
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1].values.element_size()))
    pieces = json.dumps({name: [part.shape, part.offset] for name, part in ordered.items()})
    header: dict[str, object] = {"__metadata__": {"pieces": pieces}}
    end = 0
    for name, part in ordered.items():
        values = part.values
        start, end = end, end + values.nbytes
        header[name] = {
            "dtype": CODES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (part.values.reshape(-1).view(torch.uint8).numpy().data for part in ordered.values())
    return write_hashed(path, [memoryview(len(text).to_bytes(8, "little") + text), *data])


def write_hashed(path: Path, stream: Sequence[memoryview]) -> FileDigest:
    """Flushes to the disk. An existing file is unlinked: another process may still write to it. Raises
    OSError."""
    path.unlink(missing_ok=True)
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in stream:
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                write_chunk(file, chunk)
            num_bytes += len(data)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(num_bytes, digest.hexdigest())


def write_chunk(file: BinaryIO, chunk: memoryview) -> None:
    """A seam for tests, which kill the process at any byte."""
    file.write(chunk)


def digest_of(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), digest.hexdigest())


def read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Raises OSError, SafetensorError, ValueError or KeyError."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            pieces = json.loads(file.metadata()["pieces"])
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                (whole, offset), described = pieces[name], file.get_slice(name)
                piece = (path.name, tuple(offset), tuple(described.get_shape()))
                before = found[name].pieces if name in found else ()
                found[name] = StoredTensor(described.get_dtype(), tuple(whole), (*before, piece))
    return found


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def files_for(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> set[str]:
    files = set()
    for name, tensor in tensors.items():
        _, box = local_box(tensor)
        files |= {file for file, *piece in stored[name].pieces if common_box(box, (piece[0], piece[1]))}
    return files


@torch.no_grad()
def read_into(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Fills this process's part of each tensor in place. The caller has compared names, shapes, dtypes and
    digests."""
    wanted: dict[str, list[tuple[str, Box]]] = {}
    for name in tensors:
        for file_name, offset, shape in stored[name].pieces:
            wanted.setdefault(file_name, []).append((name, (offset, shape)))
    for file_name, pieces in wanted.items():
        with safe_open(folder / file_name, "pt") as file:
            for name, piece in pieces:
                local, box = local_box(tensors[name])
                if (common := common_box(box, piece)) is not None:
                    local[_window(common, box)].copy_(file.get_slice(name)[_window(common, piece)])


def common_box(a: Box, b: Box) -> Box | None:
    """None: the boxes do not meet."""
    starts = tuple(map(max, a[0], b[0]))
    ends = [min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True)]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(n > 0 for n in shape) else None


def _window(common: Box, box: Box) -> tuple[slice, ...]:
    starts = [start - origin for start, origin in zip(common[0], box[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, common[1], strict=True))
