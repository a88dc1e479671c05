"""Virtual time: several workers, each in a thread of its own, of which exactly one runs, the one whose moment is next.

    worker 0   work ─▶ sleep(2) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▶ work …
    worker 1               └▶ work ─▶ sleep(1) ┄▶ work ─▶ sleep …          of two at one moment, who has slept first goes first
    worker 2   work ─▶ nap(9) ┄┄┄┄▶ work …                                 worker 1 has woken it

Work takes no time; only `sleep` and `nap` do. So the same works give the same result. Knows nothing of what they do.
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
        self._latest: list[int] = []  # of each worker the order of the sleep that counts: a nap that was ended does not
        self._napping: set[int] = set()
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
        self._latest = []
        for index, work in enumerate(works):
            self._batons[index].acquire()
            self._sleeping.append((self.now, index, index))
            self._latest.append(index)
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
        self._put_to_sleep(me, wakes_at)
        self._wake_next()
        self._batons[me].acquire()
        if self._error is not None:
            raise _Abandoned

    def nap(self, seconds: float) -> None:
        """Does the same, but another one may `wake` it before."""
        self._napping.add(me := self._running)
        self.sleep(seconds)
        self._napping.discard(me)

    def wake(self, worker: int) -> None:
        """Ends a worker's nap, if it takes one: it goes on at this moment."""
        if worker in self._napping:
            self._napping.discard(worker)
            self._put_to_sleep(worker, self.now)

    def _put_to_sleep(self, worker: int, wakes_at: float) -> None:
        self._num_sleeps += 1
        self._latest[worker] = self._num_sleeps
        heapq.heappush(self._sleeping, (wakes_at, self._num_sleeps, worker))

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
        while self._sleeping:
            wakes_at, order, worker = heapq.heappop(self._sleeping)
            if order == self._latest[worker]:
                self.now, self._running = max(self.now, wakes_at), worker
                self._batons[worker].release()
                return
        self._end.set()
