"""References: responses drawn before with the noise that a request will be drawn with.

    key of the noise ─▶ tokens

The reference may come from the last evaluation, from a run with another learning rate, or from the policy of
one update ago (generated ahead). With the same noise hardly a token differs. A reference is only a draft: a
wrong one costs time and changes no token.
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
"""The version of a reference from another run, whose age cannot be counted in updates."""

DEFAULT_MIB = 64.0
"""Default size of the store in MiB; a token takes four bytes."""

_TYPE = "i"


@dataclass(frozen=True)
class Reference:
    """A response drawn before."""

    token_ids: Sequence[int]
    version: int | str = 0
    """Of the policy that drew it, or REPLAY."""
    is_whole: bool = False
    """Whether the response was drawn to its end."""


class References:
    """Keeps references by the key of their noise, `mib` MiB at most (None: no limit); the oldest leave."""

    def __init__(self, mib: float | None = DEFAULT_MIB) -> None:
        self.max_tokens = sys.maxsize if mib is None else int(mib * 2**20) // array(_TYPE).itemsize
        self.num_tokens = 0
        self._kept: OrderedDict[NoiseKey, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, key: NoiseKey, token_ids: Sequence[int], version: int | str = 0, is_whole: bool = False
    ) -> None:
        """Keeps a response; it replaces what was kept under its key."""
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
        """Returns the references that this run drew, as a safetensors file; b"": there are none."""
        kept = [(key, one) for key, one in self._kept.items() if isinstance(one.version, int)]
        if not kept:
            return b""
        tokens = np.concatenate([np.frombuffer(array(_TYPE, one.token_ids), np.int32) for _, one in kept])
        numbers = [[*key, int(one.version), int(one.is_whole), len(one.token_ids)] for key, one in kept]
        return save({"numbers": np.array(numbers, np.int64), "token_ids": tokens})

    def restore(self, data: bytes, vocab_size: int) -> None:
        """Keeps what `encode` returned. Raises ValueError for damaged data or another vocabulary's tokens."""
        try:
            tensors = load(data)
            numbers, token_ids = tensors["numbers"], tensors["token_ids"]
            lengths = numbers[:, -1]
            is_complete = numbers.shape[1] == 7 and lengths.min() >= 0 and lengths.sum() == len(token_ids)
            is_known = not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < vocab_size
            if not (is_complete and is_known):
                raise ValueError("its tokens are not as many or not as large as they should be")
            texts = np.split(token_ids, lengths.cumsum()[:-1])
        except (SafetensorError, KeyError, IndexError) as error:
            raise ValueError(one_line(error)) from error
        for (*key, version, is_whole, _), text in zip(numbers.tolist(), texts, strict=True):
            self.keep((key[0], key[1], key[2], key[3]), text.tolist(), version, bool(is_whole))

    def get(self, key: NoiseKey) -> Reference | None:
        """Returns the reference of a key; None: there is none."""
        return self._kept.get(key)
