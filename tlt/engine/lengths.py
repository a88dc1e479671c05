"""Expected lengths of unfinished responses: a tuner weighs a trial against the tokens left."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tlt.engine.sequence import Sequence

_LATEST = 32
"""Responses in the moving average."""


class Lengths:
    def __init__(self) -> None:
        self._typical: float | None = None
        """None: no response has ended."""

    def note_ended(self, sequence: Sequence) -> None:
        before = sequence.num_tokens if self._typical is None else self._typical
        self._typical = before + (sequence.num_tokens - before) / _LATEST

    def left(self, sequence: Sequence) -> float:
        """A response longer than the average is expected to double."""
        return min(sequence.num_left, max(self._expected - sequence.num_tokens, sequence.num_tokens))

    def waiting(self, num_by_limit: Mapping[int, int]) -> float:
        """Expects tokens of all waiting requests together. num_by_limit: requests by max_tokens."""
        return sum(num * min(limit, self._expected) for limit, num in num_by_limit.items())

    @property
    def _expected(self) -> float:
        return math.inf if self._typical is None else self._typical
