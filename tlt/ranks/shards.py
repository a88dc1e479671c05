"""Tensors of all ranks as files, each written by one rank and read in slices by any number of them.

    rank 0   ▏policy.a▕▏policy.b, rows 0 to 7 ▕    ─▶  rank-00000.safetensors     replicated: the tensors, one behind the
    rank 1   ▏policy.b, rows 8 to 15▕▏policy.c▕    ─▶  rank-00001.safetensors     other, are cut into equal stretches of bytes
                                                                                  sharded: every rank writes what it holds

A piece is a box of a tensor: where it begins in the whole, and how large it is. So what some ranks have
written any others can read, replicated or sharded. Files are hashed while they are written. Knows neither
what tensors mean nor when a file counts.
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
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)  # as torch's own checkpoints do

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
"""Names of number types in safetensors."""

_CHUNK_BYTES = 2**23
"""Bytes hashed and written at a time: much larger than what a call costs, much smaller than a tensor."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a piece within its tensor."""


@dataclass(frozen=True)
class Piece:
    """A piece that is ready to be written. shape: of the whole tensor.
    offset: where the values begin in it.
    values: a copy on the CPU."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class FileDigest:
    """The size of a file in bytes, and the SHA-256 of its contents."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as files hold it. code: its number type (CODES).  pieces: (file, offset, shape) of each."""

    code: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def is_whole(self) -> bool:
        """Whether the pieces lie within the tensor, and are as large as it is."""
        return all(self._holds(offset, shape) for _, offset, shape in self.pieces) and (
            sum(math.prod(shape) for _, _, shape in self.pieces) == math.prod(self.shape)
        )

    def _holds(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        if not len(offset) == len(shape) == len(self.shape):
            return False
        return all(
            0 <= start < start + size <= whole
            for start, size, whole in zip(offset, shape, self.shape, strict=True)
        )


# ── who writes what ─────────────────────────────────────────────────────────────────────────────────────────


def parts_of(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Piece]:
    """Returns copies of what this rank writes of the state that all ranks hold together: its shards of
    DTensors, and its share of the tensors that every rank holds. All ranks give the same names and shapes."""
    shared = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    rows = split_rows({name: (_num_rows(t), t.nbytes) for name, t in shared.items()}, rank, world_size)
    parts: dict[str, Piece] = {}
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
            values = torch.empty(local.shape, dtype=local.dtype).copy_(
                local.detach()
            )  # contiguous, and one copy alone
            parts[name] = Piece(tuple(tensor.shape), offset, values)
    return parts


def split_rows(
    sizes: Mapping[str, tuple[int, int]], rank: int, world_size: int
) -> dict[str, tuple[int, int]]:
    """Returns rank's rows, [first, end), of tensors of (rows, bytes): laid one behind the other they are
    cut into `world_size` equal stretches, at the nearest rows."""
    ends = list(accumulate(num_bytes for _, num_bytes in sizes.values()))
    borders = [ends[-1] * k // world_size for k in (rank, rank + 1)] if ends else []

    def cut(k: int, start: int, num_rows: int, num_bytes: int) -> int:
        if rank + k in (0, world_size):
            return 0 if rank + k == 0 else num_rows
        return min(max(round((borders[k] - start) * num_rows / max(num_bytes, 1)), 0), num_rows)

    return {
        name: (cut(0, end - num_bytes, num_rows, num_bytes), cut(1, end - num_bytes, num_rows, num_bytes))
        for (name, (num_rows, num_bytes)), end in zip(sizes.items(), ends, strict=True)
    }


def local_box(tensor: Tensor) -> tuple[Tensor, Box]:
    """Returns what this process holds of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor, ((0,) * tensor.dim(), tuple(tensor.shape))
    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local.shape), (
        f"a shard of shape {list(local.shape)} that should have {list(shape)}"
    )
    return local, (tuple(offset), tuple(shape))


def is_first_copy(tensor: DTensor) -> bool:
    """Whether this process writes its shard: of shards that several ranks hold, the first one does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh of its own tensor"
    return all(
        placement.is_shard() or place == 0
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def write_shard(path: Path, parts: Mapping[str, Piece]) -> FileDigest:
    """Writes a safetensors file, and flushes it to the disk. What each piece belongs to stands in its
    metadata. A file of that name is left to whoever may still be writing it: this one is new. Raises
    OSError where it cannot be written."""
    ordered = dict(
        sorted(parts.items(), key=lambda item: -item[1].values.element_size())
    )  # so each begins at its own multiple
    header: dict[str, object] = {
        "__metadata__": {"pieces": json.dumps({n: [p.shape, p.offset] for n, p in ordered.items()})}
    }
    place = 0
    for name, part in ordered.items():
        end = place + part.values.nbytes
        header[name] = {
            "dtype": CODES[part.values.dtype],
            "shape": list(part.values.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = (part.values.reshape(-1).view(torch.uint8).numpy().data for part in ordered.values())
    return write_hashed(path, [memoryview(len(text).to_bytes(8, "little") + text), *values])


def write_hashed(path: Path, stream: Sequence[memoryview]) -> FileDigest:
    """Writes a new file and flushes it to the disk; hashes what it writes. Raises OSError where it cannot
    be written."""
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
    """Every byte of a checkpoint goes through here, so that tests can kill it at any of them."""
    file.write(chunk)


def digest_of(path: Path) -> FileDigest:
    """Reads the whole file. Raises OSError where it cannot."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), digest.hexdigest())


def read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors that these files hold together. Raises OSError, ValueError or KeyError where one
    is no such file."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        with path.open("rb") as file:
            header, _ = _read_header(file)
        pieces = json.loads(header.pop("__metadata__")["pieces"])
        for name, described in header.items():
            whole, offset = pieces[name]
            piece = (path.name, tuple(offset), tuple(described["shape"]))
            before = found[name].pieces if name in found else ()
            found[name] = StoredTensor(described["dtype"], tuple(whole), (*before, piece))
    return found


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the byte at which its values begin."""
    length = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(length)), 8 + length


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def files_for(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> set[str]:
    """Returns the files that hold something of what this process has of these tensors."""
    boxes = {name: local_box(tensor)[1] for name, tensor in tensors.items()}
    return {
        file
        for name, box in boxes.items()
        for file, *piece in stored[name].pieces
        if common_box(box, (piece[0], piece[1]))
    }


@torch.no_grad()
def read_into(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Copies what this process has of each tensor out of the files, in place, a piece at a time. Their
    names, shapes and types must have been compared, and the files' digests. Files are read, not mapped:
    one that is removed later leaves the disk."""
    wanted: dict[str, list[tuple[str, Box]]] = {}
    for name in tensors:
        for file_name, offset, shape in stored[name].pieces:
            wanted.setdefault(file_name, []).append((name, (offset, shape)))
    locals_of = {name: local_box(tensor) for name, tensor in tensors.items()}
    for file_name, pieces in wanted.items():
        with (folder / file_name).open("rb") as file:
            header, begin = _read_header(file)
            for name, piece in pieces:
                local, box = locals_of[name]
                common = common_box(box, piece)
                if common is not None:
                    start = begin + header[name]["data_offsets"][0]
                    local[_window(common, box)].copy_(_read_window(file, start, local.dtype, piece, common))


def _read_window(file: BinaryIO, start: int, dtype: torch.dtype, piece: Box, common: Box) -> Tensor:
    """Returns a box of a piece that begins at this byte; no other rows of the piece are read."""
    window, shape = _window(common, piece), piece[1]
    rows = window[0] if window else slice(0, 1)
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    file.seek(start + rows.start * row_bytes)
    data = bytearray(file.read((rows.stop - rows.start) * row_bytes))
    values = torch.frombuffer(data, dtype=dtype)
    return values.view(-1, *shape[1:])[:, *window[1:]] if window else values[0]


def common_box(a: Box, b: Box) -> Box | None:
    """Returns the box that two boxes have in common; None: they have nothing."""
    starts = tuple(map(max, a[0], b[0]))
    ends = [min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True)]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(n > 0 for n in shape) else None


def _window(common: Box, box: Box) -> tuple[slice, ...]:
    """Returns where a common box lies within a box."""
    starts = [start - origin for start, origin in zip(common[0], box[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, common[1], strict=True))
