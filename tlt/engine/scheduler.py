"""Continuous batching: which requests wait, which run, and in which slot. Lists only; it knows no tensor.

Samples of one prompt wait next to each other and are admitted together where there is room, so that their
prompt is prefilled once. The running sequences fill slots 0..B-1 without holes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tlt.engine.sequence import Decode, Sequence
from tlt.types import Request


@dataclass(frozen=True)
class Admission:
    """Neighbouring slots that start from one text: a prompt, or a response that has come from another
    engine."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]


class Scheduler:
    """Starts waiting requests in slots.

    waiting: the engine's queue.  window: positions that the model has.
    """

    def __init__(
        self,
        waiting: deque[Request],
        max_slots: int,
        window: int,
        decode: Decode | None = None,
    ) -> None:
        self.waiting, self.max_slots, self.window, self.decode = waiting, max_slots, window, decode
        self.running: list[Sequence] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest running sequence; 0 where none runs."""
        return max([len(sequence.tokens) for sequence in self.running], default=0)

    def admit(self, fits: Callable[[int, int], bool]) -> list[Admission]:
        """Starts what fits, in the order in which it waits. fits: tells whether there is memory for so
        many sequences, the longest of so many tokens; one alone always runs."""
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
        """Returns the slot of the shortest sequence, of several the latest: reading it again costs least,
        and it never is the only longest one, so that one always comes to its end."""
        return min(range(len(self.running)), key=lambda slot: (len(self.running[slot].tokens), -slot))

    def remove(self, slot: int) -> int | None:
        """Takes a sequence out; the last one takes its slot. Returns the slot that one came from."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return len(self.running)
