"""The work queue that replicas share in a phase: a few counters in the c10d Store.

    replica 0   take(12) → [0..3]   finish finish finish …      take → [9]  finish       all_done
    replica 1   take(12) → [4..6]   finish …     take → [7,8]   finish   take → []  ░ trains the drafter ░
                     └──────────── one linear order: the order of adds to `next` ────────────┘

Every phase has its own prefix (its number) under the given store, so phases never mix. Its keys:

    next      the phase's own units that were asked for; changes by add alone, so first takes never race. A
              number beyond the last unit means: none left
    queue     "next/total#replica.serial": units added later; changes by compare_set alone: one linear order
    open      units added minus units finished; all is done when num_units + open == 0 (absent means 0)
    help      "R,S#replica.serial": idle replicas that offer help; changes by compare_set alone
    load/U    number of parts of unit U, which one replica hands over to another; the parts are load/U/0, 1, …
    ahead…    see ahead_queue.py
    beat/R    see heartbeats.py

Outside of phases `at/R` holds the phase that replica R is in. A phase that all replicas have left is deleted.

There is no server of ours, no collective, and no blocking call except for parts that are being written. A
key that may be absent is read by a compare_set that cannot match.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store

from tlt.training.ranks.heartbeats import Heartbeats, ReplicaTimeout
from tlt.training.ranks.store import ABSENT, clone, read_now
from tlt.training.rollout.ahead_queue import AheadQueue

POLL_SECONDS = 0.002
IDLE_SHARE, MAX_POLL_SECONDS = 0.01, 0.01
"""A waiting replica polls at intervals of this share of the time since the last change, up to the maximum."""
CROWD, CROWD_SECONDS = 16, 0.0002
"""With more replicas than CROWD each waits at least CROWD_SECONDS times their number between polls, so that
all together poll at most 5,000 times a second."""
RACE_SECONDS = 0.0001
"""About a round trip. The loser of a race for an added unit waits at most this long times the number of
replicas before its next try. Otherwise N replicas would need N²/2 tries to take one unit each."""
HELP_SECONDS = 0.02
"""A busy replica asks for offers of help at most once in this time, because that costs a round trip."""


class WorkQueue:
    """One replica's view of the queue. Not safe for threads.

    store: a client of its own (`store.clone()`) if other threads may block on theirs.
    timeout: seconds without a sign of life after which a wait raises `ReplicaTimeout`.
    pause: seconds to wait between two polls.
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
        """Enters the next phase, without waiting. All replicas pass the same arguments, in the same order."""
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
        self.life = Heartbeats(self.store, self.replica, self.num_replicas, self.timeout, self._clock)
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
        """Takes up to min(room, ceil(remaining / (2 × replicas))) units, at least one if any remains and
        there is room: the phase's own first, then added ones. Returns none if nothing remains now (more may
        come, see `has_work`) or there is no room."""
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
        """Appends units and returns their indices. A unit's follow-up work is added *before* the unit is
        finished."""
        self.store.add("open", count)
        while True:
            first, total = self._position()
            if self._move(first, total + count):
                return range(total, total + count)
            self._let_others_go_first()

    def finish(self, unit: int) -> None:
        """Counts a unit that this replica took as finished."""
        assert unit in self._held, (
            f"{self._label}: replica {self.replica} finished unit {unit}, which it does not hold"
        )
        self._held.remove(unit)
        self._beat()
        self.store.add("open", -1)

    def abandon(self) -> None:
        """Drops this replica's unfinished units, because the run stops. The phase is never done then, and the
        next `begin` does not object."""
        self._held.clear()

    def has_work(self) -> bool:
        """Returns whether a unit could be taken now."""
        if self._has_own():
            return True
        self._refresh()
        first, total = self._position()
        return first < total

    def all_done(self) -> bool:
        """Returns whether every unit is finished, added ones included; once true, it stays true. It costs one
        round trip. At most once a second it also checks the others' heartbeats, and raises `ReplicaTimeout`
        if one is silent."""
        self._open = self.store.add("open", 0)
        if self._num_units + self._open == 0:
            return True
        self.life.watch(len(self._held), self._label)
        return False

    # -- waiting for work ------------------------------------------------------------------------------------

    def has_news(self, offers_help: bool = False) -> bool:
        """Returns whether an idle replica has something to do: a unit, or the end of the phase. Call it at
        intervals of `pause` seconds, which grow. In a crowd it does not poll each time, and returns False
        meanwhile.

        offers_help: whether this replica offers its help if there is no news.
        """
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
        """Waits before the next poll."""
        self._sleep(self.pause)

    def _be_attentive(self) -> None:
        """Polls at once the next time."""
        self._quiet_since = self._clock()
        self._asks_at = float("-inf")

    def _has_own(self) -> bool:
        """Returns whether one of the phase's own units is left. Once none is, it asks the store no more."""
        if self._next < self._num_units:
            self._next = self.store.add("next", 0)
        return self._next < self._num_units

    def _position(self) -> tuple[int, int]:
        """Returns (next added unit to hand out, number of units) as last seen."""
        if not self._queue:
            return self._num_units, self._num_units
        position, _, _ = self._queue.partition(b"#")
        first, _, total = position.partition(b"/")
        return int(first), int(total)

    def _move(self, first: int, total: int) -> bool:
        """Moves the queue on from where it was last seen; returns whether no other replica was faster."""
        self._queue, has_moved = self._compare_set("queue", self._queue, f"{first}/{total}")
        return has_moved

    def _compare_set(self, key: str, seen: bytes, value: str) -> tuple[bytes, bool]:
        """Replaces the value that was last seen; returns (the value now, whether it is this replica's). The
        value names its author, so that a loser does not take the winner's equal one for its own."""
        self._serial += 1
        wanted = f"{value}#{self.replica}.{self._serial}"
        now = self.store.compare_set(key, seen.decode(), wanted)
        return now, now == wanted.encode()

    def _let_others_go_first(self) -> None:
        self._sleep(self._random.random() * RACE_SECONDS * self.num_replicas)

    def _refresh(self) -> bool:
        """Reads the queue's state; returns whether it has moved since this replica last saw it."""
        value = read_now(self.store, "queue")
        seen, self._queue = self._queue, b"" if value == ABSENT else value
        return self._queue != seen

    # -- handing work over -----------------------------------------------------------------------------------

    def offer_help(self) -> None:
        """Offers this idle replica's help, until it takes a unit. Call it again while waiting: another
        replica may have taken what was handed over because of this offer."""
        self._offers_help = True
        self._change_help(lambda offers: offers if self.replica in offers else [*offers, self.replica])

    def num_offers(self) -> int:
        """Returns how many replicas offer help; 0 if it was asked less than `HELP_SECONDS` ago."""
        if self._clock() - self._asked_at < HELP_SECONDS:
            return 0
        self._asked_at = self._clock()
        return len(_offers_in(read_now(self.store, "help")))

    def accept_help(self) -> int | None:
        """Accepts one offer, and adds a unit for it, which any replica may take; `hand_over` must follow at
        once. None: nobody offers help any more. Call it *before* you finish the unit that the new one is
        taken from."""
        if not self._change_help(lambda offers: offers[1:]):
            return None
        (unit,) = self.add_units(1)
        return unit

    def hand_over(self, unit: int, parts: Sequence[bytes]) -> None:
        """Writes the unit's parts, whose meaning the caller knows."""
        for index, part in enumerate(parts):
            self.store.set(f"load/{unit}/{index}", part)  # type: ignore[arg-type]  # the stubs know text only
        self.store.set(f"load/{unit}", str(len(parts)))

    def receive(self, unit: int) -> list[bytes]:
        """Returns the parts of a handed-over unit, once they are written."""
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
        """Changes the list of offers; returns whether that made a difference."""
        seen = read_now(self.store, "help")
        while (changed := change(offers := _offers_in(seen))) != offers:
            names = ",".join(map(str, changed))
            seen, is_changed = self._compare_set("help", b"" if seen == ABSENT else seen, names)
            if is_changed:
                return True
        return False

    # -- signs of life ---------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Shows that this replica is at work. Call it every engine step; it writes once a second."""
        self.life.beat_now_and_then(len(self._held))

    def _beat(self) -> None:
        self.life.beat(len(self._held))

    @property
    def _label(self) -> str:
        return f"phase {self._name!r}"


def local_work_queue(timeout: float = float("inf")) -> WorkQueue:
    """Builds the queue of a single replica; its counters live in this process."""
    return WorkQueue(HashStore(), replica=0, num_replicas=1, timeout=timeout)


def connect_work_queue(store: Store, replica: int, num_replicas: int, timeout: float) -> WorkQueue:
    """Makes a queue with its own key prefix and its own connection, which no other thread's wait blocks."""
    if num_replicas == 1:
        return local_work_queue(timeout)
    connection = clone(store)
    connection.set_timeout(timedelta(seconds=timeout))
    return WorkQueue(PrefixStore("queue", connection), replica, num_replicas, timeout)


def _offers_in(value: bytes) -> list[int]:
    """Returns the replicas that a value of `help` names."""
    replicas = b"" if value == ABSENT else value.partition(b"#")[0]
    return [int(replica) for replica in replicas.split(b",") if replica]
