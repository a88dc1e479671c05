"""How long responses may be expected to become, by those that have ended. A tuner asks what a trial has
left to pay for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from tlt.engine.sequence import Sequence
from tlt.types import Request

_LATEST = 32
"""Responses that tell how long others will be."""


class Lengths:
    """An average of the latest responses."""

    def __init__(self) -> None:
        self._typical: float | None = None
        """Tokens of a response; None: none has ended."""

    def note_ended(self, sequence: Sequence) -> None:
        """Remembers how long a response has become."""
        before = sequence.num_tokens if self._typical is None else self._typical
        self._typical = before + (sequence.num_tokens - before) / _LATEST

    def left(self, running: Collection[Sequence], waiting: Iterable[Request]) -> float:
        """Returns the tokens that may be expected for each running sequence, those of waiting requests
        included. One that is longer than others were is expected to become as long again."""
        typical = math.inf if self._typical is None else self._typical
        left = sum(min(s.num_left, max(typical - s.num_tokens, s.num_tokens)) for s in running)
        return (left + sum(min(request.params.max_tokens, typical) for request in waiting)) / len(running)
