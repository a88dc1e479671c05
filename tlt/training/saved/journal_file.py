"""The records of a journal's file, appended, each with a checksum.

    record     bytes of the payload, u32 │ CRC-32 of the payload, u32 │ payload
    payload    a line of JSON │ token ids, int32 │ log-probabilities, float64

A killed process tears at most the last record. A damaged record ends its file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

_FRAME = struct.Struct("<II")
_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f8")


@dataclass(frozen=True)
class JournalRecord:
    """Facts, as JSON, and a stretch of a response, perhaps empty."""

    about: Mapping[str, Any]
    tokens: bytes = field(default=b"", repr=False)
    numbers: bytes = field(default=b"", repr=False)

    @staticmethod
    def of(
        about: Mapping[str, Any], token_ids: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> JournalRecord:
        return JournalRecord(
            about, np.array(token_ids, _TOKEN).tobytes(), np.array(logprobs, _LOGPROB).tobytes()
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN.itemsize

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.tokens, _TOKEN).tolist())

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(np.frombuffer(self.numbers, _LOGPROB).tolist())

    def encode(self) -> bytes:
        payload = json.dumps(self.about).encode() + b"\n" + self.tokens + self.numbers
        return _FRAME.pack(len(payload), crc32(payload)) + payload

    @staticmethod
    def decode(payload: bytes) -> JournalRecord:
        """Raises ValueError."""
        line, _, stretch = payload.partition(b"\n")
        about = json.loads(line)
        num, rest = divmod(len(stretch), _TOKEN.itemsize + _LOGPROB.itemsize)
        if rest or not isinstance(about, dict):
            raise ValueError("no record of a journal")
        end = num * _TOKEN.itemsize
        return JournalRecord(about, stretch[:end], stretch[end:])


def read_record(file: BinaryIO) -> JournalRecord | None:
    """None: no whole record follows; the position stays."""
    start = file.tell()
    frame = file.read(_FRAME.size)
    if len(frame) == _FRAME.size:
        length, checksum = _FRAME.unpack(frame)
        payload = file.read(length)
        if len(payload) == length and crc32(payload) == checksum:
            try:
                return JournalRecord.decode(payload)
            except ValueError:
                pass
    file.seek(start)
    return None


def read_records(file: BinaryIO) -> Iterator[tuple[int, JournalRecord]]:
    """Yields (position, record); ends behind the last record."""
    place = file.tell()
    while (record := read_record(file)) is not None:
        yield place, record
        place = file.tell()
