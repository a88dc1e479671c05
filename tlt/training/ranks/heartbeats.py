"""Heartbeats of a phase's replicas, as keys of its store.

beat/R    "changes:held:told"   written by replica R alone; waiting replicas watch it change
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed import Store

from tlt.training.launch.failures import RankAwaited
from tlt.training.ranks.store import ABSENT, read_now

_WATCH_SECONDS = 1.0


class ReplicaTimeout(RankAwaited): ...


class Heartbeats:
    """One replica's heartbeat, and its view of the others'.

    held: its unfinished units.
    tells: the text that travels with each heartbeat.
    """

    def __init__(
        self, store: Store, replica: int, num_replicas: int, timeout: float, clock: Callable[[], float]
    ) -> None:
        self.store, self.replica, self.num_replicas = store, replica, num_replicas
        self.timeout, self._clock = timeout, clock
        self.tells: Callable[[], str] = str
        self._changes = 0
        self._beaten_at = float("-inf")
        self._watched = dict.fromkeys(range(num_replicas), (ABSENT, clock()))
        self._watched_at = clock()
        self._next_watched = 0

    def beat(self, held: int) -> None:
        self._changes += 1
        self._beaten_at = self._clock()
        self.store.set(f"beat/{self.replica}", f"{self._changes}:{held}:{self.tells()}")

    def beat_now_and_then(self, held: int) -> None:
        if self._clock() - self._beaten_at >= _WATCH_SECONDS:
            self.beat(held)

    def watch(self, held: int, phase: str) -> None:
        """Reads some of the others' heartbeats, at most once a second. Raises ReplicaTimeout."""
        now = self._clock()
        if now - self._watched_at < _WATCH_SECONDS:
            return
        self._watched_at = now
        if not held:
            self.beat_now_and_then(held)
        for replica in self._next_to_watch():
            beat = read_now(self.store, f"beat/{replica}")
            seen, since = self._watched[replica]
            if beat != seen:
                self._watched[replica] = (beat, now)
            elif now - since > self.timeout and replica != self.replica:
                what = "has not begun it"
                if beat != ABSENT:
                    what = f"holds {beat.decode().split(':')[1]} unit(s)"
                raise ReplicaTimeout(
                    f"{phase}: replica {self.replica} waits for replica {replica}, which {what} and has "
                    f"shown no sign of life for {now - since:.1f} s (time-out {self.timeout:g} s)"
                )

    def told(self) -> list[str]:
        beats = (read_now(self.store, f"beat/{replica}") for replica in range(self.num_replicas))
        told = (beat.decode().split(":", 2)[2] for beat in beats if beat != ABSENT)
        return [text for text in told if text]

    def _next_to_watch(self) -> list[int]:
        """Few enough not to swamp the store; each replica ten times within the time-out."""
        num = min(max(math.ceil(10 * self.num_replicas / self.timeout), 1), self.num_replicas)
        turn = [(self._next_watched + i) % self.num_replicas for i in range(num)]
        self._next_watched = (self._next_watched + num) % self.num_replicas
        return turn
