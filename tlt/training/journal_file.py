"""The records of a journal's file: appended, and each whole or found out. Knows neither who writes them nor what for.

    record     bytes of the payload, u32 │ CRC-32 of the payload, u32 │ payload
    payload    a line of JSON │ token ids, int32 │ log-probabilities, float64

A process that is killed tears the last record at most. One that is not as it was written ends its file, for nothing says where
the next one begins.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

_FRAME = struct.Struct("<II")
_BYTES_A_TOKEN = 12


@dataclass(frozen=True)
class Record:
    """about: facts, of kinds that JSON has.  token_ids, logprobs: a stretch of a response; empty where it is about none."""

    about: Mapping[str, Any]
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)

    def encode(self) -> bytes:
        """Returns the record as a file holds it."""
        line = json.dumps(self.about).encode() + b"\n"
        payload = line + np.array(self.token_ids, "<i4").tobytes() + np.array(self.logprobs, "<f8").tobytes()
        return _FRAME.pack(len(payload), crc32(payload)) + payload

    @staticmethod
    def decode(payload: bytes) -> Record:
        """Returns the record in a payload. Raises ValueError where there is none."""
        line, _, stretch = payload.partition(b"\n")
        about = json.loads(line)
        num, rest = divmod(len(stretch), _BYTES_A_TOKEN)
        if rest or not isinstance(about, dict):
            raise ValueError("no record of a journal")
        token_ids, logprobs = np.frombuffer(stretch, "<i4", num), np.frombuffer(stretch, "<f8", num, 4 * num)
        return Record(about, tuple(token_ids.tolist()), tuple(logprobs.tolist()))


def read_record(file: BinaryIO) -> Record | None:
    """Reads the next record. None, and the file stands where it stood: there is none as it was written."""
    start = file.tell()
    frame = file.read(_FRAME.size)
    if len(frame) == _FRAME.size:
        length, checksum = _FRAME.unpack(frame)
        payload = file.read(length)
        if len(payload) == length and crc32(payload) == checksum:
            try:
                return Record.decode(payload)
            except ValueError:
                pass
    file.seek(start)
    return None


def read_records(file: BinaryIO) -> Iterator[tuple[int, Record]]:
    """Yields the records from here on, each with its place in the file, which stands behind the last of them at the end."""
    while True:
        place = file.tell()
        record = read_record(file)
        if record is None:
            return
        yield place, record
