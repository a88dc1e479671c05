"""References: responses that were drawn before with the very noise that a request will be drawn with.

    key of the noise ─▶ tokens          the same problem and sample in the last evaluation, in a run with another learning rate,
                                        or generated ahead by the policy of one update ago: hardly a token differs

A reference is a guess. What the request's own policy draws decides, so a wrong one costs time and no token. Knows no engine.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int, int, int]
"""As `Request.key` has it."""

DEFAULT_MIB = 64.0
"""MiB of references that are kept, where nobody says how many; a token takes four bytes."""

_TYPE = "i"


@dataclass(frozen=True)
class Reference:
    """A response. version: of the policy that wrote it."""

    token_ids: Sequence[int]
    version: int = 0


class References:
    """Keeps token ids by the key of their noise; beyond `mib` MiB those that were kept first leave first. None: all stay."""

    def __init__(self, mib: float | None = DEFAULT_MIB) -> None:
        self.max_tokens = sys.maxsize if mib is None else int(mib * 2**20) // array(_TYPE).itemsize
        self.num_tokens = 0
        self._kept: OrderedDict[Key, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, token_ids: Sequence[int], version: int = 0) -> None:
        """Keeps a response, in place of what was kept under its key."""
        self.drop(key)
        self._kept[key] = Reference(array(_TYPE, token_ids), version)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self.drop(next(iter(self._kept)))

    def drop(self, key: Key) -> None:
        """Forgets what is kept under a key, if anything."""
        if (dropped := self._kept.pop(key, None)) is not None:
            self.num_tokens -= len(dropped.token_ids)

    def get(self, key: Key) -> Reference | None:
        """Returns what is kept under a key."""
        return self._kept.get(key)
