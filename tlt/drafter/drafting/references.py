"""References: responses that were drawn before with the very noise that a request will be drawn with.

    key of the noise ─▶ tokens          the same problem and sample in the last evaluation, in a run with another learning rate,
                                        or generated ahead by the policy of one update ago: hardly a token differs

A reference is a guess. What the request's own policy draws decides, so a wrong one costs time and no
token. Knows no engine.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tlt.io.text import one_line
from tlt.types import NoiseKey

REPLAY = "replay"
"""The version of a reference that another run has written: its age is no number of updates."""

DEFAULT_MIB = 64.0
"""MiB of references that are kept, where nobody says how many; a token takes four bytes."""

_TYPE = "i"


@dataclass(frozen=True)
class Reference:
    """A response. version: of the policy that wrote it, or REPLAY.
    is_whole: whether it was written to its end."""

    token_ids: Sequence[int]
    version: int | str = 0
    is_whole: bool = False


class References:
    """Keeps token ids by the key of their noise; beyond `mib` MiB those that were kept first leave first.
    None: all stay."""

    def __init__(self, mib: float | None = DEFAULT_MIB) -> None:
        self.max_tokens = sys.maxsize if mib is None else int(mib * 2**20) // array(_TYPE).itemsize
        self.num_tokens = 0
        self._kept: OrderedDict[NoiseKey, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, key: NoiseKey, token_ids: Sequence[int], version: int | str = 0, is_whole: bool = False
    ) -> None:
        """Keeps a response, in place of what was kept under its key."""
        self.drop(key)
        self._kept[key] = Reference(array(_TYPE, token_ids), version, is_whole)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self.drop(next(iter(self._kept)))

    def drop(self, key: NoiseKey) -> None:
        """Forgets what is kept under a key, if anything."""
        if (dropped := self._kept.pop(key, None)) is not None:
            self.num_tokens -= len(dropped.token_ids)

    def encode(self) -> bytes:
        """Returns what this run itself has drawn as a safetensors file; b"": nothing."""
        kept = [(key, one) for key, one in self._kept.items() if isinstance(one.version, int)]
        if not kept:
            return b""
        tokens = np.concatenate([np.frombuffer(array(_TYPE, one.token_ids), np.int32) for _, one in kept])
        numbers = [[*key, int(one.version), int(one.is_whole), len(one.token_ids)] for key, one in kept]
        return save({"numbers": np.array(numbers, np.int64), "token_ids": tokens})

    def restore(self, data: bytes, vocab_size: int) -> None:
        """Takes up what `encode` returned. Raises ValueError for what it cannot have returned."""
        try:
            tensors = load(data)
            numbers, token_ids = tensors["numbers"], tensors["token_ids"]
            lengths = numbers[:, -1]
            is_complete = numbers.shape[1] == 7 and lengths.min() >= 0 and lengths.sum() == len(token_ids)
            if not is_complete or (
                len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size
            ):
                raise ValueError("its tokens are not as many or not as large as they should be")
            texts = np.split(token_ids, lengths.cumsum()[:-1])
        except (SafetensorError, KeyError, IndexError) as error:
            raise ValueError(one_line(error)) from error
        for (*key, version, is_whole, _), text in zip(numbers.tolist(), texts, strict=True):
            self.keep((key[0], key[1], key[2], key[3]), text.tolist(), version, bool(is_whole))

    def get(self, key: NoiseKey) -> Reference | None:
        """Returns what is kept under a key."""
        return self._kept.get(key)
