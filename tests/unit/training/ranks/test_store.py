"""Ranks meet on a store that survives restarts, and nothing of an earlier attempt reaches a later one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from tlt.base.types import UserError
from tlt.training.launch.place import Place, find_place
from tlt.training.ranks.store import Attempt, attempt_store, is_over, meet, open_store
from tlt.training.rollout.work_queue import WorkQueue


@contextmanager
def gathering(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Calls each in a thread; at the end the list holds what they returned or raised."""
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


def meeting(store: Store, *ranks: int, world_size: int = 3, timeout: float = 30.0) -> list[Any]:
    with gathering(*(lambda rank=rank: meet(store, rank, world_size, timeout) for rank in ranks)) as attempts:
        pass
    return [attempt.number for attempt in attempts]


def test_every_attempt_has_a_number_that_all_ranks_know() -> None:
    store = HashStore()
    assert meeting(store, 0, 1, 2) == [1, 1, 1]
    later = meeting(store, 2, 1, 0)
    assert later[0] > 1
    assert len(set(later)) == 1


def test_a_rank_that_died_while_others_waited_is_not_taken_for_the_one_in_its_place() -> None:
    """Rank 1 says hello and dies; torchrun starts it again, while the others still wait in the same place."""
    store = HashStore()
    with pytest.raises(UserError, match=r"2 of 3 did not come .* \(rank 0, 2; rank 1 waited\)"):
        meet(store, 1, 3, 0.1)
    died, waits = [], threading.Event()

    def rank_0_notices(seconds: float) -> None:
        died.append(store.num_keys())
        waits.set()
        threading.Event().wait(0.01)

    def late(rank: int) -> Attempt:
        assert waits.wait(30)
        return meet(store, rank, 3, 30.0)

    with gathering(
        lambda: meet(store, 0, 3, 30.0, sleep=rank_0_notices), lambda: late(1), lambda: late(2)
    ) as numbers:
        pass
    assert len({*numbers}) == 1, numbers
    assert died, "rank 0 met whom it never saw"


def test_an_attempt_is_over_for_all_once_one_of_its_ranks_comes_again() -> None:
    """Its launcher has started that one again; those on other machines would wait for the dead until their
    time-out."""
    store = HashStore()
    with gathering(*(lambda rank=rank: meet(store, rank, 2, 30.0) for rank in range(2))) as attempts:
        pass
    assert attempts[0] == attempts[1]
    assert not is_over(store, attempts[0])
    with pytest.raises(UserError, match="did not come"):
        meet(store, 1, 2, 0.1)
    assert is_over(store, attempts[0])
    with gathering(*(lambda rank=rank: meet(store, rank, 2, 30.0) for rank in range(2))) as attempts:
        pass
    assert not is_over(store, attempts[0])


def test_a_stranger_who_does_not_know_the_ranks_secret_neither_ends_nor_joins_their_attempt() -> None:
    """Another user of the machine reaches its loopback, and the store asks nobody who they are."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "TLT_SECRET": "between us",
    }
    places = [find_place({**environ, "RANK": str(rank)}) for rank in range(2)]
    stores = [open_store(place, 30.0) for place in places if place is not None]
    with gathering(*(lambda rank=rank: meet(stores[rank], rank, 2, 30.0) for rank in range(2))) as attempts:
        pass
    with socket.create_connection(("127.0.0.1", port)) as noise:
        noise.sendall(b"hello? " * 100)
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    with pytest.raises(UserError, match="did not come"):
        meet(stranger, 1, 2, 0.1)
    assert not is_over(stores[0], attempts[0])


def test_those_who_do_not_come_are_named_in_one_line() -> None:
    with gathering(*(lambda rank=rank: meet(HASH, rank, 4, 0.3) for rank in (0, 2))) as said:
        pass
    for error, rank in zip(said, (0, 2), strict=True):
        assert isinstance(error, UserError)
        assert f"2 of 4 did not come within 0.3 s (rank 1, 3; rank {rank} waited)" in str(error)


HASH = HashStore()


def test_counters_of_an_attempt_do_not_reach_the_next_one() -> None:
    """Without the prefix the second attempt would find the units of the first handed out, and finished."""
    store = HashStore()
    for number in (1, 2):
        replicas = [
            WorkQueue(attempt_store(store, Attempt(number, 2)), replica, 2, 30.0) for replica in range(2)
        ]
        for replica in replicas:
            replica.begin("rollout 0", 4)
        taken = []
        while units := [unit for replica in replicas for unit in replica.take(1)]:
            taken += units
            if number == 1:
                break  # killed
        assert taken == ([0, 1] if number == 1 else [0, 1, 2, 3])


@pytest.mark.parametrize("secret", ["", "known"])
def test_a_port_that_was_lost_is_the_users_mistake_only_where_the_user_has_chosen_it(secret: str) -> None:
    """The launcher starts the ranks again after any error but the user's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = Place(0, 2, 0, 2, master_port=port, is_server=True, secret=secret)
        with pytest.raises(OSError if secret else UserError, match="Address already in use"):
            open_store(place, 5.0)
