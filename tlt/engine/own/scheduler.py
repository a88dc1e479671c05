"""Continuous batching: which requests wait, which run, and in which slot.

Samples of one prompt are neighbours in the queue and are admitted together where there is room, so that
their prompt is prefilled once. The running sequences fill slots 0..B-1 without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tlt.engine.sequence import Decode, Sequence
from tlt.engine.waiting import Waiting


@dataclass(frozen=True)
class Admission:
    """Neighbouring slots that start from one text: a prompt, or a prompt with an unfinished response."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]


class Scheduler:
    """Starts waiting requests in slots.

    waiting: the engine's queue.
    window: positions of the model.
    """

    def __init__(self, waiting: Waiting, max_slots: int, window: int, decode: Decode | None = None) -> None:
        self.waiting, self.max_slots, self.window, self.decode = waiting, max_slots, window, decode
        self.running: list[Sequence] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest running sequence; 0 where none runs."""
        return max([len(sequence.tokens) for sequence in self.running], default=0)

    def admit(self, fits: Callable[[int, int], bool]) -> list[Admission]:
        """Starts waiting requests in order while they fit.

        fits: returns whether memory suffices for (number of sequences, tokens of the longest); a single
            sequence always starts.
        """
        admissions: list[Admission] = []
        longest = self.longest
        while self.waiting and len(self.running) < self.max_slots:
            slot, request = len(self.running), self.waiting.first
            longest = max(longest, len(request.prompt_ids) + len(request.token_ids))
            if self.running and not fits(slot + 1, longest):
                break
            self.running.append(Sequence.start(self.waiting.take_first(), self.window, self.decode))
            tokens = tuple(self.running[slot].tokens)
            if admissions and admissions[-1].tokens == tokens:
                admissions[-1] = Admission(tokens, (*admissions[-1].slots, slot))
            else:
                admissions.append(Admission(tokens, (slot,)))
        return admissions

    def cheapest(self) -> int:
        """Returns the slot of the shortest sequence, the latest of several. It costs least to prefill again.
        The longest sequence is never preempted by this rule, so it always finishes."""
        return min(range(len(self.running)), key=lambda slot: (len(self.running[slot].tokens), -slot))

    def remove(self, slot: int) -> int | None:
        """Removes a sequence; the last one moves to its slot. Returns the slot that it left; None: none
        moved."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return len(self.running)
