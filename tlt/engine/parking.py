"""Caches of responses that ended a turn and may go on, beside the slots. What was kept is not read again.

    slot ─ park ─▶ [ keys and values │ the drafter's state ] ─ take ─▶ another slot
                     └─ forget: the response has ended, or the memory is wanted

A response may always be read again instead, so what is kept changes no token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlt.base.types import ResponseId


@dataclass(frozen=True)
class Parked:
    """One response between two turns."""

    tokens: tuple[int, ...]
    """Those that the target has read."""
    entries: list[Tensor]
    """Keys and values by layer, [2 × kv heads, length, head dim]."""
    draft: Any
    """From `Drafter.park`."""
    num_bytes: int
    """Of all of it, as the memory's budget counts a slot."""


class Parking:
    """num_bytes: of all that is parked."""

    def __init__(self) -> None:
        self._parked: OrderedDict[ResponseId, Parked] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, response_id: ResponseId, parked: Parked) -> None:
        assert response_id not in self._parked
        self._parked[response_id] = parked
        self.num_bytes += parked.num_bytes

    def take(self, response_id: ResponseId, tokens: list[int]) -> Parked | None:
        """tokens: that the response has now. None: nothing of it was kept."""
        parked = self._parked.pop(response_id, None)
        if parked is None:
            return None
        self.num_bytes -= parked.num_bytes
        return parked if tuple(tokens[: len(parked.tokens)]) == parked.tokens else None

    def forget(self, response_id: ResponseId) -> None:
        self.take(response_id, [])

    def forget_oldest(self) -> None:
        self.forget(next(iter(self._parked)))

    def clear(self) -> None:
        self._parked.clear()
        self.num_bytes = 0
