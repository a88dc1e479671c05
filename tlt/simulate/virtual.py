"""Virtual time: several workers, each in a thread of its own, of which exactly one runs, the one whose moment is next.

    worker 0   work ─▶ sleep(2) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▶ work …
    worker 1               └▶ work ─▶ sleep(1) ┄▶ work ─▶ sleep …          of two at one moment, who has slept first goes first

Work takes no time; only `sleep` does. So the same works give the same result. Knows nothing of what they do.
"""

from __future__ import annotations

import heapq
import os
import sys
import threading
from collections.abc import Callable, Sequence


class _Abandoned(BaseException):
    """Another worker has failed: this one leaves."""


class VirtualTime:
    """now: seconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, int, int]] = []  # when it wakes, the order of falling asleep, who
        self._num_sleeps = 0
        self._running = 0
        self._batons: list[threading.Lock] = []
        self._end = threading.Event()
        self._error: BaseException | None = None

    def clock(self) -> float:
        """Returns the time, as `time.perf_counter` does."""
        return self.now

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Runs all of them from now on, to the end of the last. What one raises ends all, and is raised here."""
        assert not self._sleeping, "nobody is at work"
        self._batons, self._end = [threading.Lock() for _ in works], threading.Event()
        for index, work in enumerate(works):
            self._batons[index].acquire()
            self._sleeping.append((self.now, index, index))
            threading.Thread(target=self._work, args=(index, work), daemon=True).start()
        self._num_sleeps = len(works)
        self._wake_next()
        self._end.wait()
        if self._error is not None:
            raise self._error

    def sleep(self, seconds: float) -> None:
        """Lets the worker that runs go on so much later."""
        me, wakes_at = self._running, self.now + seconds
        if not self._sleeping or wakes_at < self._sleeping[0][0]:
            self.now = wakes_at  # nobody comes before
            return
        self._num_sleeps += 1
        heapq.heappush(self._sleeping, (wakes_at, self._num_sleeps, me))
        self._wake_next()
        self._batons[me].acquire()
        if self._error is not None:
            raise _Abandoned

    def _work(self, index: int, work: Callable[[], None]) -> None:
        if sys.platform == "linux":  # one thread runs at a time, and a baton costs less where it need not go to another core
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self._batons[index].acquire()
        try:
            if self._error is None:
                work()
        except _Abandoned:
            pass
        except BaseException as error:  # it is raised where `run` was called
            self._error = error
        self._wake_next()

    def _wake_next(self) -> None:
        """Gives the baton on; the last one who has nobody to give it to ends it all."""
        if not self._sleeping:
            self._end.set()
            return
        wakes_at, _, self._running = heapq.heappop(self._sleeping)
        self.now = max(self.now, wakes_at)
        self._batons[self._running].release()
