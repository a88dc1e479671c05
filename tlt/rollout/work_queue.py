"""The shared queue of a phase, as a few counters in the c10d Store. Knows neither what a unit is nor how it
is worked on.

    replica 0   take(12) → [0..3]   finish finish finish …      take → [9]  finish       all_done
    replica 1   take(12) → [4..6]   finish …     take → [7,8]   finish   take → []  ░ polls: trains the drafter ░
                     └──────────── one linear order: whoever adds to `next` first ───────────┘

Keys, under one prefix per phase (its number), so that phases never mix; all of them lie under the store that
is handed in:

    next      units of the phase's own that were asked for; moved by add only, so that a crowd takes its first units without a
              race. It may exceed their number: who is given one beyond has none
    queue     "next/total#replica.serial"   units that were added since; moved by compare_set only: their takes and additions
              are one linear order
    open      units added minus units finished; all is done when num_units + open == 0 (an absent counter reads as 0)
    help      "R,S#replica.serial"          replicas without work that offer to take some of another's; compare_set only
    load/U    number of parts of unit U, which one replica hands over to whoever takes it; the parts are load/U/0, 1, …
    ahead…    see ahead_queue.py
    beat/R    see heartbeats.py

Outside of phases there is `at/R`: the phase that replica R is in. Phases that all have left are deleted.

There is no server of ours, no collective, and no call that blocks but for parts that are being written. A
key that may be absent is read by a compare_set that cannot match.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store

from tlt.ranks.heartbeats import Heartbeats, ReplicaTimeout
from tlt.ranks.store import ABSENT, read_now
from tlt.rollout.ahead_queue import AheadQueue

POLL_SECONDS = 0.002
IDLE_SHARE, MAX_POLL_SECONDS = 0.01, 0.01
"""A replica that waits asks for news at intervals of this share of the time for which nothing has changed,
or so often."""
CROWD, CROWD_SECONDS = 16, 0.0002
"""Where there are more replicas than this each of them waits so long, times their number, at least: all
together ask at most 5,000 times a second."""
RACE_SECONDS = 0.0001
"""About a round trip. Who has lost a race for an added unit waits so long, times the number of replicas at
most, before its next try: otherwise N replicas would need N²/2 tries to take one each."""
HELP_SECONDS = 0.02
"""A replica at work asks at most once in the second time who offers help, for that costs it a round trip."""


class WorkQueue:
    """One replica's view of the queue. The replica's leader uses it, from one thread.

    store: a client of its own (`store.clone()`) where other threads may block on theirs.
    timeout: seconds without any sign of life after which a wait raises `ReplicaTimeout`.
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
        self.replica = replica
        self.num_replicas = num_replicas
        self.timeout = timeout
        self._root, self._clock, self._sleep = store, clock, sleep
        self._index = -1
        self._oldest_kept = 0
        self._serial = 0
        self._random = random.Random(replica)
        self._asks_at, self.pause = (
            float("-inf"),
            POLL_SECONDS,
        )  # seconds between two questions of one who waits

    # -- phases ----------------------------------------------------------------------------------------------

    def begin(self, phase_name: str, num_units: int) -> None:
        """Enters the next phase. Every replica calls it with the same arguments, in the same order; nobody
        waits."""
        assert not (self._index >= 0 and self._held), (
            f"{self._label}: units {sorted(self._held)} were taken and not finished"
        )
        self._index += 1
        self._name = phase_name
        self._num_units = num_units
        self._held: set[int] = set()
        self.store = PrefixStore(str(self._index), self._root)
        self._next, self._queue = 0, b""
        mine = f"{phase_name}: {num_units} units"
        agreed = self.store.compare_set("args", "", mine).decode()
        assert agreed == mine, (
            f"replica {self.replica} began phase {self._index} as {mine!r}, another as {agreed!r}"
        )
        self._root.set(f"at/{self.replica}", str(self._index))
        self._life = Heartbeats(self.store, self.replica, self.num_replicas, self.timeout, self._clock)
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
        there is room: of the phase's own first, then of those added. Returns none where nothing remains
        now (more may come, see `has_work`) or there is no room."""
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
                if self._refresh():
                    continue
                return []
            count = min(room, self._share(total - first))
            if self._move(first + count, total):
                return list(range(first, first + count))
            self._let_others_go_first()

    def _share(self, num: int) -> int:
        return -(-num // (2 * self.num_replicas))

    def add_units(self, count: int) -> range:
        """Appends units and returns their indices. New work that follows from a unit is added *before*
        that is finished."""
        self.store.add("open", count)
        while True:
            first, total = self._position()
            if self._move(first, total + count):
                return range(total, total + count)
            self._let_others_go_first()

    def finish(self, unit: int) -> None:
        """Counts a unit that this replica took as completed."""
        assert unit in self._held, (
            f"{self._label}: replica {self.replica} finished unit {unit}, which it does not hold"
        )
        self._held.remove(unit)
        self._beat()
        self.store.add("open", -1)

    def abandon(self) -> None:
        """Lets go of what this replica holds, unfinished, because the run stops. The phase is never done
        then, and the next `begin` does not object."""
        self._held.clear()

    def has_work(self) -> bool:
        """Returns whether a unit could be taken now."""
        if self._has_own():
            return True
        self._refresh()
        first, total = self._position()
        return first < total

    def all_done(self) -> bool:
        """Returns whether every unit is finished, those added included; once true, it stays true. It costs
        one round trip. At most once a second it also looks whether the others show signs of life, and
        raises `ReplicaTimeout` if one does not."""
        self._open = self.store.add("open", 0)
        if self._num_units + self._open == 0:
            return True
        self._life.watch(len(self._held), self._label)
        return False

    # -- waiting for work ------------------------------------------------------------------------------------

    def has_news(self, offers_help: bool = False) -> bool:
        """Returns whether there is something to do for a replica without work: a unit, or the end of the
        phase. In a crowd it does not ask each time, and says no meanwhile. Whoever waits calls it at
        intervals of `pause` seconds, which grow.

        offers_help: whether it offers its help to the others where there is no news.
        """
        now = self._clock()
        if now < self._asks_at:
            return False
        before = self._open, self._next, self._queue
        if self.all_done() or self.has_work():
            return True
        if has_changed := (self._open, self._next, self._queue) != before:
            self._quiet_since = now
        crowd = CROWD_SECONDS * self.num_replicas if self.num_replicas > CROWD else 0.0
        self._asks_at = now + crowd
        self.pause = max(
            min(max(IDLE_SHARE * (now - self._quiet_since), POLL_SECONDS), MAX_POLL_SECONDS), crowd
        )
        if offers_help and (has_changed or not self._offers_help):
            self.offer_help()
        return False

    def rest(self) -> None:
        """Waits before the next question for news."""
        self._sleep(self.pause)

    def _be_attentive(self) -> None:
        """Asks for news at once."""
        self._quiet_since, self._asks_at = self._clock(), float("-inf")

    def _has_own(self) -> bool:
        """Returns whether one of the phase's own units is left; asks no more once none is."""
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
        """Moves the queue on from where it was last seen; returns whether no other replica was faster. The
        value names its author, so that a loser does not take the winner's for its own. Either way `_queue`
        is the latest state afterwards."""
        self._serial += 1
        wanted = f"{first}/{total}#{self.replica}.{self._serial}".encode()
        self._queue = self.store.compare_set("queue", self._queue.decode(), wanted.decode())
        return self._queue == wanted

    def _let_others_go_first(self) -> None:
        self._sleep(self._random.random() * RACE_SECONDS * self.num_replicas)

    def _refresh(self) -> bool:
        """Reads the queue's state; returns whether it had moved since this replica last saw it."""
        value = read_now(self.store, "queue")
        seen, self._queue = self._queue, b"" if value == ABSENT else value
        return self._queue != seen

    # -- handing work over -----------------------------------------------------------------------------------

    def offer_help(self) -> None:
        """Says that this replica has run dry; the offer stands until it takes a unit. Call it again while
        waiting: another replica may have taken what was handed over because of this offer."""
        self._offers_help = True
        self._change_help(lambda offers: offers if self.replica in offers else [*offers, self.replica])

    def num_offers(self) -> int:
        """Returns how many replicas offer help; asks at most once in `HELP_SECONDS`, and says 0 in
        between."""
        if self._clock() - self._asked_at < HELP_SECONDS:
            return 0
        self._asked_at = self._clock()
        return len(offers_in(read_now(self.store, "help")))

    def accept_help(self) -> int | None:
        """Accepts one offer, so that no other replica does, and adds a unit for it, which anyone may take:
        `hand_over` has to follow at once. None: nobody offers help any more. Call it *before* you finish
        what the unit is taken from."""
        if not self._change_help(lambda offers: offers[1:]):
            return None
        (unit,) = self.add_units(1)
        return unit

    def hand_over(self, unit: int, parts: Sequence[bytes]) -> None:
        """Writes what the unit consists of: parts, whose meaning the caller knows."""
        for index, part in enumerate(parts):
            self.store.set(f"load/{unit}/{index}", part)  # type: ignore[arg-type]  # the stubs know text only
        self.store.set(f"load/{unit}", str(len(parts)))

    def receive(self, unit: int) -> list[bytes]:
        """Returns the parts of a unit that was handed over and that this replica took. They may still be
        written: it waits."""
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
        """Changes the list of offers; returns whether that made a difference. Like the queue's, the value
        names its author."""
        seen = read_now(self.store, "help")
        while (changed := change(offers_in(seen))) != offers_in(seen):
            self._serial += 1
            wanted = f"{','.join(map(str, changed))}#{self.replica}.{self._serial}".encode()
            seen = self.store.compare_set("help", "" if seen == ABSENT else seen.decode(), wanted.decode())
            if seen == wanted:
                return True
        return False

    # -- signs of life ---------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Says that this replica is at work. Call it every engine step: it writes once a second, and else
        costs a clock."""
        self._life.beat_now_and_then(len(self._held))

    def _beat(self) -> None:
        self._life.beat(len(self._held))

    @property
    def _label(self) -> str:
        return f"phase {self._name!r}"


def local_work_queue(timeout: float = float("inf")) -> WorkQueue:
    """Makes the queue of a single replica: the counters live in this process."""
    return WorkQueue(HashStore(), replica=0, num_replicas=1, timeout=timeout)


def connect_work_queue(store: Store, replica: int, num_replicas: int, timeout: float) -> WorkQueue:
    """Makes a queue with a client connection of its own, which nobody's blocking wait holds up, and
    a key prefix of its own."""
    if num_replicas == 1:
        return local_work_queue(timeout)
    connection: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    connection.set_timeout(timedelta(seconds=timeout))
    return WorkQueue(PrefixStore("queue", connection), replica, num_replicas, timeout)


def offers_in(value: bytes) -> list[int]:
    replicas = b"" if value == ABSENT else value.partition(b"#")[0]
    return [int(replica) for replica in replicas.split(b",") if replica]
