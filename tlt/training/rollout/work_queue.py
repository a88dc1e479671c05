"""The work queue that replicas share in a phase: a few counters in the c10d Store.

    replica 0   take(12) → [0..3]   finish finish finish …      take → [9]  finish       all_done
    replica 1   take(12) → [4..6]   finish …     take → [7,8]   finish   take → []  ░ trains the drafter ░
                     └──────────── one linear order: the order of adds to `next` ────────────┘

The keys of a phase, under its number:

    next      the phase's own units given out; changes by add alone, so first takes never race
    queue     "next/total#replica.serial": units added later; changes by compare_set alone
    open      units added minus units finished; all is done when num_units + open == 0
    help      "R,S#replica.serial": idle replicas that offer help; changes by compare_set alone
    load/U    number of parts of unit U, handed over by a replica; the parts are load/U/0, 1, …
    ahead…    see idle/ahead_queue.py
    beat/R    see ranks/heartbeats.py

Outside of phases `at/R` holds replica R's phase.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store

from tlt.training.idle.ahead_queue import AheadQueue
from tlt.training.ranks.heartbeats import Heartbeats, ReplicaTimeout
from tlt.training.ranks.store import ABSENT, clone, read_now

POLL_SECONDS = 0.002
IDLE_SHARE, MAX_POLL_SECONDS = 0.01, 0.01
"""A waiting replica's poll interval, as a share of the time since the last change, and its maximum."""
CROWD, CROWD_SECONDS = 16, 0.0002
"""More than CROWD replicas together poll at most 1 / CROWD_SECONDS times a second."""
RACE_SECONDS = 0.0001
"""About a round trip. The loser of a race for an added unit waits up to this long times the number of
replicas; else N replicas need N²/2 tries to take one unit each."""
HELP_SECONDS = 0.02
"""Least seconds between two reads of the offers, each a round trip."""


class WorkQueue:
    """Not safe for threads.

    store: a client of its own (`store.clone()`) if other threads may block on theirs.
    timeout: seconds without a sign of life until a wait raises `ReplicaTimeout`.
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        num_replicas: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert 0 <= replica < num_replicas, f"replica {replica} of {num_replicas}"
        self.replica, self.num_replicas, self.timeout = replica, num_replicas, timeout
        self._root, self._clock, self._sleep = store, clock, sleep
        self._index, self._held = -1, set[int]()
        self._oldest_kept = self._serial = 0
        self._random = random.Random(replica)
        self.pause, self._asks_at = POLL_SECONDS, float("-inf")

    # -- phases ----------------------------------------------------------------------------------------------

    def begin(self, phase_name: str, num_units: int) -> None:
        """Does not wait. All replicas pass the same arguments, in the same order."""
        assert not self._held, f"{self._label}: units {sorted(self._held)} were taken and not finished"
        self._index += 1
        self._name = phase_name
        self._num_units = num_units
        self.store = PrefixStore(str(self._index), self._root)
        self._next, self._queue = 0, b""
        mine = f"{phase_name}: {num_units} units"
        agreed = self.store.compare_set("args", "", mine).decode()
        assert agreed == mine, (
            f"replica {self.replica} began {self._index} as {mine!r}, another as {agreed!r}"
        )
        self._root.set(f"at/{self.replica}", str(self._index))
        self.heartbeats = Heartbeats(self.store, self.replica, self.num_replicas, self.timeout, self._clock)
        self._open = 0
        self._be_attentive()
        self._asked_at = float("-inf")
        self._offers_help = False
        self._beat()
        if self.replica == 0:
            self._delete_phases_that_all_have_left()

    def _delete_phases_that_all_have_left(self) -> None:
        places = [read_now(self._root, f"at/{replica}") for replica in range(self.num_replicas)]
        if ABSENT in places:
            return
        for index in range(self._oldest_kept, min(map(int, places))):
            old = PrefixStore(str(index), self._root)
            beats = [f"beat/{replica}" for replica in range(self.num_replicas)]
            for key in ("args", "next", "queue", "open", "help", *beats, *AheadQueue(old).keys()):
                old.delete_key(key)
            self._oldest_kept = index + 1

    # -- the queue -------------------------------------------------------------------------------------------

    def take(self, room: int) -> list[int]:
        """Up to min(room, ceil(remaining / (2 × replicas))) units, at least one: the phase's own first.
        Empty: none now; more may come."""
        units = (self._take_own(room) or self._take_added(room)) if room > 0 else []
        if units:
            self._held.update(units)
            self._beat()
            self._retract_help()
            self._be_attentive()
        return units

    def _take_own(self, room: int) -> list[int]:
        if not self._has_own():
            return []
        count = min(room, self._share(self._num_units - self._next))
        self._next = self.store.add("next", count)
        return list(range(self._next - count, min(self._next, self._num_units)))

    def _take_added(self, room: int) -> list[int]:
        while True:
            first, total = self._position()
            if first == total:
                if not self._refresh():
                    return []
                continue
            count = min(room, self._share(total - first))
            if self._move(first + count, total):
                return list(range(first, first + count))
            self._let_others_go_first()

    def _share(self, num: int) -> int:
        return -(-num // (2 * self.num_replicas))

    def add_units(self, count: int) -> range:
        """Add follow-up work *before* you finish its unit."""
        self.store.add("open", count)
        while True:
            first, total = self._position()
            if self._move(first, total + count):
                return range(total, total + count)
            self._let_others_go_first()

    def finish(self, unit: int) -> None:
        assert unit in self._held, (
            f"{self._label}: replica {self.replica} finished unit {unit}, which it does not hold"
        )
        self._held.remove(unit)
        self._beat()
        self.store.add("open", -1)

    def abandon(self) -> None:
        """Drops this replica's unfinished units. The phase is never done then."""
        self._held.clear()

    def has_work(self) -> bool:
        if self._has_own():
            return True
        self._refresh()
        first, total = self._position()
        return first < total

    def all_done(self) -> bool:
        """Once true, it stays true. One round trip; once a second it checks heartbeats. Raises
        `ReplicaTimeout`."""
        self._open = self.store.add("open", 0)
        if self._num_units + self._open == 0:
            return True
        self.heartbeats.watch(len(self._held), self._label)
        return False

    # -- waiting for work ------------------------------------------------------------------------------------

    def has_news(self, offers_help: bool = False) -> bool:
        """A unit is there, or the phase has ended. Call it every `pause` seconds, which grow; in a crowd some
        calls do not poll."""
        now = self._clock()
        if now < self._asks_at:
            return False
        before = self._open, self._next, self._queue
        if self.all_done() or self.has_work():
            return True
        if has_changed := (self._open, self._next, self._queue) != before:
            self._quiet_since = now
        least = CROWD_SECONDS * self.num_replicas if self.num_replicas > CROWD else 0.0
        self._asks_at = now + least
        pause = max(IDLE_SHARE * (now - self._quiet_since), POLL_SECONDS)
        self.pause = max(min(pause, MAX_POLL_SECONDS), least)
        if offers_help and (has_changed or not self._offers_help):
            self.offer_help()
        return False

    def rest(self) -> None:
        self._sleep(self.pause)

    def _be_attentive(self) -> None:
        self._quiet_since = self._clock()
        self._asks_at = float("-inf")

    def _has_own(self) -> bool:
        if self._next < self._num_units:
            self._next = self.store.add("next", 0)
        return self._next < self._num_units

    def _position(self) -> tuple[int, int]:
        if not self._queue:
            return self._num_units, self._num_units
        position, _, _ = self._queue.partition(b"#")
        first, _, total = position.partition(b"/")
        return int(first), int(total)

    def _move(self, first: int, total: int) -> bool:
        self._queue, has_moved = self._compare_set("queue", self._queue, f"{first}/{total}")
        return has_moved

    def _compare_set(self, key: str, seen: bytes, value: str) -> tuple[bytes, bool]:
        """Returns (the value now, whether this replica wrote it). Values name their author: a loser may want
        an equal one."""
        self._serial += 1
        wanted = f"{value}#{self.replica}.{self._serial}"
        now = self.store.compare_set(key, seen.decode(), wanted)
        return now, now == wanted.encode()

    def _let_others_go_first(self) -> None:
        self._sleep(self._random.random() * RACE_SECONDS * self.num_replicas)

    def _refresh(self) -> bool:
        value = read_now(self.store, "queue")
        seen, self._queue = self._queue, b"" if value == ABSENT else value
        return self._queue != seen

    # -- handing work over -----------------------------------------------------------------------------------

    def offer_help(self) -> None:
        """Until this replica takes a unit. Call it again while waiting: another replica may have taken the
        unit."""
        self._offers_help = True
        self._change_help(lambda offers: offers if self.replica in offers else [*offers, self.replica])

    def num_offers(self) -> int:
        """0 within `HELP_SECONDS` of the last call."""
        if self._clock() - self._asked_at < HELP_SECONDS:
            return 0
        self._asked_at = self._clock()
        return len(_offers_in(read_now(self.store, "help")))

    def accept_help(self) -> int | None:
        """Adds a unit for one offer, which any replica may take; `hand_over` must follow at once. None: no
        offer is left. Call it *before* you finish the unit it is taken from."""
        if not self._change_help(lambda offers: offers[1:]):
            return None
        (unit,) = self.add_units(1)
        return unit

    def hand_over(self, unit: int, parts: Sequence[bytes]) -> None:
        for index, part in enumerate(parts):
            self.store.set(f"load/{unit}/{index}", part)  # type: ignore[arg-type]  # the stubs know text only
        self.store.set(f"load/{unit}", str(len(parts)))

    def receive(self, unit: int) -> list[bytes]:
        since = self._clock()
        while (num_parts := read_now(self.store, f"load/{unit}")) == ABSENT:
            if self._clock() - since > self.timeout:
                raise ReplicaTimeout(
                    f"{self._label}: unit {unit} was handed over, but not its parts, for {self.timeout:g} s"
                )
            self._sleep(POLL_SECONDS)
        keys = [f"load/{unit}/{index}" for index in range(int(num_parts))]
        parts = [read_now(self.store, key) for key in keys]
        for key in (f"load/{unit}", *keys):
            self.store.delete_key(key)
        return parts

    def _retract_help(self) -> None:
        if self._offers_help:
            self._offers_help = False
            self._change_help(lambda offers: [replica for replica in offers if replica != self.replica])

    def _change_help(self, change: Callable[[list[int]], list[int]]) -> bool:
        seen = read_now(self.store, "help")
        while (changed := change(offers := _offers_in(seen))) != offers:
            names = ",".join(map(str, changed))
            seen, is_changed = self._compare_set("help", b"" if seen == ABSENT else seen, names)
            if is_changed:
                return True
        return False

    # -- signs of life ---------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Every engine step; it writes once a second."""
        self.heartbeats.beat_now_and_then(len(self._held))

    def _beat(self) -> None:
        self.heartbeats.beat(len(self._held))

    @property
    def _label(self) -> str:
        return f"phase {self._name!r}"


def local_work_queue(timeout: float = float("inf")) -> WorkQueue:
    return WorkQueue(HashStore(), replica=0, num_replicas=1, timeout=timeout)


def connect_work_queue(store: Store, replica: int, num_replicas: int, timeout: float) -> WorkQueue:
    if num_replicas == 1:
        return local_work_queue(timeout)
    connection = clone(store)
    connection.set_timeout(timedelta(seconds=timeout))
    return WorkQueue(PrefixStore("queue", connection), replica, num_replicas, timeout)


def _offers_in(value: bytes) -> list[int]:
    replicas = b"" if value == ABSENT else value.partition(b"#")[0]
    return [int(replica) for replica in replicas.split(b",") if replica]
