"""When simulated replicas look for news: where there is some, and as soon as real ones would. So looks that would find nothing
take no time to simulate, however many replicas there are. Knows no phase.

    idle    looks after a unit was added, or the last one finished ─ at its next poll, or after the engine step under way
    busy    looks after help was offered, if it has anything to hand over
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

from torch.distributed import Store

from tlt.distributed.store import read_now
from tlt.distributed.work_queue import HELP_SECONDS, POLL_SECONDS, Coordinator, offers_in
from tlt.simulate.engine import SimulatedEngine
from tlt.simulate.virtual import VirtualTime
from tlt.training.rollout.work import worth_migrating

_EPSILON = 1e-6
_CALLED = 4
"""Replicas that notice an offer: of all that look every 20 ms the first one takes it, and who that is, is chance."""


class Looks:
    """Knows of all replicas who has to look. longest: seconds that an idle one goes without, since it may have to rest."""

    def __init__(self, time: VirtualTime, engines: Sequence[SimulatedEngine]) -> None:
        self.time, self.engines = time, engines
        self.longest = 10.0
        self._random = random.Random(0)
        self.num_offers = self.num_open = 0
        self.is_idle = [False] * len(engines)
        self.has_unseen = [False] * len(engines)

    def tell_idle(self) -> None:
        """Lets all idle replicas look: a unit was added, or none is open any more."""
        for index, is_idle in enumerate(self.is_idle):
            if is_idle:
                self.has_unseen[index] = True
                self.time.wake(index)

    def tell_busy(self) -> None:
        """Lets some of those look that could hand something over: help was offered."""
        busy = [index for index, is_idle in enumerate(self.is_idle) if not is_idle]
        self._random.shuffle(busy)
        for index in itertools.islice(filter(self.has_to_share, busy), _CALLED):
            self.time.wake(index)

    def has_to_share(self, index: int) -> bool:
        """Returns whether a busy replica has anything that is worth handing over."""
        engine = self.engines[index]
        if len(engine.running) + engine.num_waiting < 2:
            return False
        running = [(one.num_cached, one.num_left) for one in engine.running]
        return bool(engine.num_waiting or worth_migrating(running, self.num_offers))

    def steps(self, index: int, seconds: float, num: int, asks_in: float) -> int:
        """Sleeps through up to `num` steps of so many seconds; where there is news, to the end of the one that is under way
        then. Returns how many. asks_in: seconds before which an idle replica asks nobody."""
        if self.is_idle[index]:
            limit = max(asks_in, POLL_SECONDS) if self.has_unseen[index] else self.longest
        else:
            limit = HELP_SECONDS if self.num_offers and self.has_to_share(index) else math.inf
        num = min(num, max(math.ceil(min(limit / seconds, num)), 1))
        start = self.time.now
        self.time.nap(seconds * num)
        num = min(max(math.ceil((self.time.now - start) / seconds - _EPSILON), 1), num)
        self.time.sleep(max(start + seconds * num - self.time.now, 0.0))
        return num


class LookingCoordinator(Coordinator):
    """Tells the others of what it changes, and rests until there is news."""

    def __init__(self, looks: Looks, store: Store, index: int, num: int) -> None:
        super().__init__(store, index, num, math.inf, looks.time.clock, looks.time.sleep)
        self.looks = looks

    @property
    def asks_in(self) -> float:
        """Seconds before which it asks nobody."""
        return self._asks_at - self._clock()

    def begin(self, phase_name: str, num_units: int) -> None:
        super().begin(phase_name, num_units)
        self.looks.is_idle[self.replica] = False
        self.looks.num_offers, self.looks.num_open = 0, num_units

    def take(self, room: int) -> list[int]:
        units = super().take(room)
        self.looks.is_idle[self.replica] &= not units
        return units

    def add_units(self, count: int) -> range:
        units = super().add_units(count)
        self.looks.num_open += count
        self.looks.tell_idle()
        return units

    def finish(self, unit: int) -> None:
        super().finish(unit)
        self.looks.num_open -= 1
        if not self.looks.num_open:
            self.looks.tell_idle()

    def has_news(self, offers_help: bool = False) -> bool:
        self.looks.is_idle[self.replica] = True
        if self.asks_in <= 0:
            self.looks.has_unseen[self.replica] = False
        return super().has_news(offers_help)

    def rest(self) -> None:
        start = self._clock()
        if not self.looks.has_unseen[self.replica]:
            self.looks.time.nap(self.looks.longest)
        waited = self._clock() - start
        self._sleep((math.floor(waited / self.pause) + 1) * self.pause - waited)

    def _change_help(self, change: Callable[[list[int]], list[int]]) -> bool:
        has_changed = super()._change_help(change)
        if has_changed:
            before, self.looks.num_offers = self.looks.num_offers, len(offers_in(read_now(self.store, "help")))
            if self.looks.num_offers > before:
                self.looks.tell_busy()
        return has_changed
