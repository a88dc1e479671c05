"""References: responses drawn before with the noise of a request. They come from the last evaluation, the
policy of one update ago, or a file (`tlt generate --references`).
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.base.types import NoiseKey

DEFAULT_MIB = 64.0
"""Four bytes per token."""

_TYPE = "i"


@dataclass(frozen=True)
class Reference:
    token_ids: Sequence[int]
    version: int = 0
    """Version of the policy that drew the response."""
    is_whole: bool = False


class References:
    """Holds `mib` MiB at most (None: no limit); the oldest leave."""

    def __init__(self, mib: float | None = DEFAULT_MIB) -> None:
        self.max_tokens = sys.maxsize if mib is None else int(mib * 2**20) // array(_TYPE).itemsize
        self.num_tokens = 0
        self._kept: OrderedDict[NoiseKey, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: NoiseKey, token_ids: Sequence[int], version: int = 0, is_whole: bool = False) -> None:
        self.drop(key)
        self._kept[key] = Reference(array(_TYPE, token_ids), version, is_whole)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self.drop(next(iter(self._kept)))

    def drop(self, key: NoiseKey) -> None:
        if (dropped := self._kept.pop(key, None)) is not None:
            self.num_tokens -= len(dropped.token_ids)

    def get(self, key: NoiseKey) -> Reference | None:
        return self._kept.get(key)
