"""The expected length of unfinished responses, from those that have ended. A tuner weighs the cost of a
trial against the tokens left."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tlt.engine.sequence import Sequence

_LATEST = 32
"""Responses that the moving average reaches back to."""


class Lengths:
    """A moving average of the lengths of the latest responses."""

    def __init__(self) -> None:
        self._typical: float | None = None
        """Average tokens of a response; None: none has ended."""

    def note_ended(self, sequence: Sequence) -> None:
        """Includes the length of a finished response."""
        before = sequence.num_tokens if self._typical is None else self._typical
        self._typical = before + (sequence.num_tokens - before) / _LATEST

    def left(self, sequence: Sequence) -> float:
        """Returns the expected tokens left of a running sequence. One that is longer than the average is
        expected to double."""
        return min(sequence.num_left, max(self._expected - sequence.num_tokens, sequence.num_tokens))

    def waiting(self, num_by_limit: Mapping[int, int]) -> float:
        """Returns the expected tokens of waiting requests together, by how many may have so many tokens."""
        return sum(num * min(limit, self._expected) for limit, num in num_by_limit.items())

    @property
    def _expected(self) -> float:
        return math.inf if self._typical is None else self._typical
