"""Continuous batching: which requests wait, which run, and in which slot.

Samples of one prompt are neighbours in the queue, so they start together and share a prefill where there is
room. Running sequences fill slots 0..B-1 without gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tlt.base.types import Request
from tlt.engine.sequence import Decode, Sequence


@dataclass(frozen=True)
class Admission:
    """Slots that start from one text."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    num_read: int = 0
    """Tokens that the cache holds already."""

    @property
    def num_left(self) -> int:
        """Tokens to read: all but the last, which the first decoding step reads."""
        return len(self.tokens) - 1 - self.num_read


class Scheduler:
    def __init__(
        self, waiting: deque[Request], max_slots: int, window: int, decode: Decode | None = None
    ) -> None:
        self.waiting, self.max_slots, self.window, self.decode = waiting, max_slots, window, decode
        self.running: list[Sequence] = []

    @property
    def longest(self) -> int:
        return max([len(sequence.tokens) for sequence in self.running], default=0)

    def admit(self, fits: Callable[[int, int], bool]) -> list[Admission]:
        """fits: given (sequences, tokens of the longest); a single sequence always starts."""
        admissions: list[Admission] = []
        longest = self.longest
        while self.waiting and len(self.running) < self.max_slots:
            slot, request = len(self.running), self.waiting[0]
            longest = max(longest, len(request.prompt_ids) + len(request.token_ids))
            if self.running and not fits(slot + 1, longest):
                break
            self.running.append(Sequence.start(self.waiting.popleft(), self.window, self.decode))
            tokens = tuple(self.running[slot].tokens)
            if admissions and admissions[-1].tokens == tokens:
                admissions[-1] = Admission(tokens, (*admissions[-1].slots, slot))
            else:
                admissions.append(Admission(tokens, (slot,)))
        return admissions

    def cheapest(self) -> int:
        """The shortest sequence, the latest of equals, costs least to prefill again. So the longest always
        finishes."""
        return min(range(len(self.running)), key=lambda slot: (len(self.running[slot].tokens), -slot))

    def remove(self, slot: int) -> int | None:
        """The last sequence moves to the slot. Returns the slot that it left; None: none moved."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return len(self.running)
