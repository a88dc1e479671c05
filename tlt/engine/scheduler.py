"""Continuous batching: which requests wait, which run, and in which slot. Lists only; it knows no tensor.

Samples of one prompt wait next to each other and are admitted together where there is room, so that their prompt is
prefilled once. The running sequences fill slots 0..B-1 without holes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tlt.engine.sequence import Sequence
from tlt.types import Request


@dataclass(frozen=True)
class Admission:
    """Neighbouring slots that start from one text: a prompt, or a response that has come from another engine."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]


class Scheduler:
    def __init__(self, max_slots: int, window: int) -> None:
        self.max_slots, self.window = max_slots, window
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []

    @property
    def room(self) -> int:
        """The number of requests that could start at once."""
        return max(self.max_slots - len(self.running) - len(self.waiting), 0)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self) -> list[Admission]:
        """Starts what fits."""
        admissions: list[Admission] = []
        while self.waiting and len(self.running) < self.max_slots:
            slot = len(self.running)
            self.running.append(Sequence.start(self.waiting.popleft(), self.window))
            tokens = tuple(self.running[slot].tokens)
            if admissions and admissions[-1].tokens == tokens:
                admissions[-1] = Admission(tokens, (*admissions[-1].slots, slot))
            else:
                admissions.append(Admission(tokens, (slot,)))
        return admissions

    def remove(self, slot: int) -> int | None:
        """Takes a sequence out; the last one takes its slot. Returns the slot that one came from."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return len(self.running)

    def clear(self) -> None:
        self.waiting.clear()
        self.running.clear()
