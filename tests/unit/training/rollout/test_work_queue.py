"""The shared queue: every unit is taken once, all done means all done, and a silent replica is named."""

import math
from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store, TCPStore

from tlt.training.idle.ahead_queue import AheadQueue
from tlt.training.rollout.work_queue import (
    CROWD_SECONDS,
    MAX_POLL_SECONDS,
    POLL_SECONDS,
    ReplicaTimeout,
    WorkQueue,
    connect_work_queue,
)


class Clock:
    """Time that passes only when told to, or while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_until_done(queue: WorkQueue, clock: Clock) -> None:
    while not queue.all_done():
        clock.sleep(0.002)


def make_replicas(
    num_replicas: int, num_units: int, clock: Clock | None = None, timeout: float = 60.0
) -> list[WorkQueue]:
    clock = clock or Clock()
    store = HashStore()
    replicas = [WorkQueue(store, r, num_replicas, timeout, clock, clock.sleep) for r in range(num_replicas)]
    for replica in replicas:
        replica.begin("rollout 0", num_units)
    return replicas


# An action is (replica, what, amount). The model beside it is a plain list.
actions = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["take", "finish", "add", "look", "offer", "hand over"]),
        st.integers(0, 9),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(num_replicas=st.integers(1, 4), num_units=st.integers(0, 40), script=actions)
def test_any_interleaving_hands_out_each_unit_exactly_once(
    num_replicas: int, num_units: int, script: list
) -> None:
    replicas = make_replicas(num_replicas, num_units)
    total, taken, num_finished = num_units, [], 0
    held: list[list[int]] = [[] for _ in replicas]
    offers: list[int] = []
    loads: dict[int, list[bytes]] = {}

    for who, what, amount in script:
        who %= num_replicas
        if what == "take":
            limit = min(amount, math.ceil((total - len(taken)) / (2 * num_replicas)))
            units = replicas[who].take(amount)
            assert len(units) <= limit or (not replicas[who].has_work() and limit == 0)
            assert bool(units) == (amount > 0 and len(taken) < total)
            taken += units
            held[who] += units
            if units and who in offers:
                offers.remove(who)
            assert all(replicas[who].receive(unit) == loads[unit] for unit in units if unit in loads)
        elif what == "offer":
            replicas[who].offer_help()
            offers += [who] if who not in offers else []
        elif what == "hand over":
            unit = replicas[who].accept_help()
            assert unit == (total if offers else None)
            if unit is not None:
                offers.pop(0)
                loads[unit] = [bytes([unit % 256, part]) for part in range(amount)]
                replicas[who].hand_over(unit, loads[unit])
                total += 1
        elif what == "finish" and held[who]:
            replicas[who].finish(held[who].pop())
            num_finished += 1
        elif what == "add":
            assert list(replicas[who].add_units(amount)) == list(range(total, total + amount))
            total += amount
        elif what == "look":  # not after every action: it refreshes the view, and a take must do without
            assert replicas[who].has_work() == (len(taken) < total)
        assert all(replica.all_done() == (num_finished == total) for replica in replicas)
    for _ in range(total):  # at least one unit each time round
        for who, replica in enumerate(replicas):
            units = replica.take(5)
            taken += units
            held[who] += units
    for who, replica in enumerate(replicas):
        for unit in held[who]:
            replica.finish(unit)
            num_finished += 1
    assert all(replica.all_done() and not replica.has_work() for replica in replicas)
    assert sorted(taken) == list(range(total))


def test_an_offer_of_help_is_accepted_by_one_replica_only() -> None:
    """Both saw the same two offers, and both want to leave the second."""
    first, second, *idle = make_replicas(4, 0)
    for replica in idle:
        replica.offer_help()
    got: list[int | None] = []
    first.store = Interfering(first.store, lambda: got.append(second.accept_help()), "help")
    assert first.accept_help() == 1
    assert got == [0]
    assert first.accept_help() is None, "both offers are gone"


def test_bytes_are_handed_over_through_a_server_as_they_are() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    busy, idle = (connect_work_queue(server, replica, 2, timeout=60.0) for replica in range(2))
    for replica in (busy, idle):
        replica.begin("rollout 0", 0)
    idle.offer_help()
    unit, parts = busy.accept_help(), [bytes(range(256)), b"", b"-", bytes(7 * 2**20)]
    assert unit is not None
    busy.hand_over(unit, parts)
    assert idle.take(1) == [unit]
    assert idle.receive(unit) == parts


def test_what_was_handed_over_is_waited_for_while_it_is_being_written_and_not_for_ever() -> None:
    clock = Clock()
    giver, taker = make_replicas(2, 0, clock, timeout=5.0)
    (unit,) = giver.add_units(1)
    assert taker.take(1) == [unit]
    store, naps = (
        giver.store,
        iter([lambda: store.set(f"load/{unit}/0", "x"), lambda: store.set(f"load/{unit}", "1")]),
    )

    def nap(seconds: float) -> None:
        clock.sleep(seconds)
        next(naps, lambda: None)()

    taker._sleep = nap
    assert taker.receive(unit) == [b"x"]
    with pytest.raises(ReplicaTimeout, match=f"unit {unit} was handed over"):
        taker.receive(unit)
    assert 5.0 < clock.now < 10.0


class Interfering:
    """A store that lets `action` happen between a replica's decision and its change of a key, once."""

    def __init__(self, store: Store, action: Callable[[], object], key: str = "queue") -> None:
        self.store, self.action, self.key = store, action, key

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._interfere(key, expected != desired)
        return self.store.compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        self._interfere(key, amount != 0)
        return self.store.add(key, amount)

    def _interfere(self, key: str, changes: bool) -> None:
        if key == self.key and changes and self.action is not None:
            action, self.action = self.action, None
            action()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_a_take_of_added_units_that_loses_a_race_takes_others() -> None:
    first, second = make_replicas(2, 0)
    first.add_units(8)
    store = first.store
    got: list[int] = []
    first.store = Interfering(store, lambda: got.extend(second.take(2)))
    assert first.take(2) == [2, 3]
    assert got == [0, 1]
    # Units added between decision and move: the total must not be rolled back.
    first.store = Interfering(store, lambda: second.add_units(4))
    assert first.take(1) == [4]
    assert [unit for _ in range(12) for unit in second.take(1)] == [5, 6, 7, 8, 9, 10, 11]


def test_a_silent_replica_is_named_after_the_timeout_and_one_at_work_is_not() -> None:
    clock = Clock()
    first, second = make_replicas(2, 2, clock, timeout=30.0)
    first.take(1)
    for _ in range(100):  # far longer than the time-out, but with signs of life
        clock.now += 1.0
        first.heartbeat()
        assert not second.all_done()
    second.take(1)
    second.finish(1)
    with pytest.raises(
        ReplicaTimeout, match=r"phase 'rollout 0': replica 1 waits for replica 0, which holds 1 unit"
    ) as error:
        wait_until_done(second, clock)
    assert 30.0 < clock.now - 100.0 < 35.0, str(error.value)


def test_a_replica_that_never_begins_the_phase_is_named() -> None:
    clock = Clock()
    alone = WorkQueue(HashStore(), 0, 2, 10.0, clock, clock.sleep)
    alone.begin("rollout 0", 2)
    alone.take(1)
    alone.take(1)
    with pytest.raises(ReplicaTimeout, match="replica 1, which has not begun it"):
        wait_until_done(alone, clock)


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Store) -> None:
        self.store, self.num_asked = store, 0

    def __getattr__(self, name: str) -> object:
        self.num_asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize(("num_replicas", "longest"), [(2, MAX_POLL_SECONDS), (512, 512 * CROWD_SECONDS)])
def test_who_waits_asks_less_and_less_often_up_to_a_bound_and_anew_when_something_changes(
    num_replicas: int, longest: float
) -> None:
    clock = Clock()
    busy, idle, *_ = make_replicas(num_replicas, 2, clock, timeout=600.0)
    units = [unit for _ in range(2) for unit in busy.take(1)]
    store = Counting(idle.store)
    idle.store = store
    pauses = []
    while clock.now < 60.0:
        assert not idle.has_news()
        pauses.append(idle.pause)
        clock.sleep(idle.pause)
    assert pauses[0] == (POLL_SECONDS if num_replicas == 2 else longest)
    assert pauses == sorted(pauses)
    assert pauses[-1] == longest
    assert store.num_asked < 4 * len(pauses), (
        "to wait is to ask for two values, and to show signs of life now and then"
    )
    busy.finish(units[0])
    clock.sleep(longest)
    assert not idle.has_news()
    assert idle.pause == pauses[0]
    busy.finish(units[1])
    clock.sleep(longest)
    assert idle.has_news()
    assert idle.all_done()


def test_phases_do_not_mix_and_old_ones_leave_no_keys() -> None:
    store = HashStore()
    replicas = [WorkQueue(store, r, 2, 60.0) for r in range(2)]
    sizes = []
    for phase in range(20):
        for replica in replicas:
            replica.begin(f"rollout {phase}", 3)
        assert not replicas[0].all_done()
        for replica in replicas:
            while units := replica.take(2):
                for unit in units:
                    replica.finish(unit)
        replicas[1].offer_help()
        handed_over = replicas[0].accept_help()
        assert handed_over is not None
        replicas[0].hand_over(handed_over, [b"a", b"b"])
        assert replicas[1].take(1) == [handed_over]
        replicas[1].receive(handed_over)
        replicas[1].finish(handed_over)
        assert all(replica.all_done() for replica in replicas)
        for replica in replicas:
            AheadQueue(replica.store).note_done([0, 1])
        sizes.append(store.num_keys())
    assert sizes[-1] == sizes[3]
    # A replica that is still in an old phase keeps that phase's counters alive.
    for phase in range(20, 23):
        replicas[0].begin(f"rollout {phase}", 0)
    assert replicas[1].all_done()


def test_a_unit_cannot_be_finished_twice_nor_by_another_nor_forgotten() -> None:
    first, second = make_replicas(2, 4)
    (unit,) = first.take(1)
    with pytest.raises(AssertionError, match="does not hold"):
        second.finish(unit)
    with pytest.raises(AssertionError, match="not finished"):
        first.begin("rollout 1", 4)
    first.finish(unit)
    with pytest.raises(AssertionError, match="does not hold"):
        first.finish(unit)
    (unit,) = first.take(1)
    first.abandon()
    first.begin("rollout 1", 4)
