"""Waiting for another rank through the Store: writing a large model may outlast a collective's time-out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch.distributed import PrefixStore, Store

from tlt.base.types import UserError
from tlt.training.launch.failures import RankAwaited
from tlt.training.ranks.store import ABSENT, clone, read_now
from tlt.training.ranks.world import World, gather_objects

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
"""Seconds between two polls, doubled from the first to the longest."""

PATIENCE_SECONDS = 3600.0
"""Longest wait for a rank that works alone, for example writes a model."""


class Waiting:
    """store: a connection of its own."""

    def __init__(self, store: Store, patience: float = PATIENCE_SECONDS) -> None:
        self._store, self.patience = store, patience
        self.is_over = threading.Event()
        """Set when this process ends: every wait ends at once."""

    def publish(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def wait_for(self, key: str, whom: str) -> Any:
        deadline, pause = time.monotonic() + self.patience, _FIRST_PAUSE
        while (value := read_now(self._store, key)) == ABSENT:
            if self.is_over.wait(pause):
                raise TimeoutError(f"{whom} was still awaited when this process ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{whom} has been awaited for {self.patience:g} s")
            pause = min(2 * pause, _LONGEST_PAUSE)
        return json.loads(value)


def connect_waiting(world: World, patience: float = PATIENCE_SECONDS) -> Waiting:
    return Waiting(clone(world.store), patience)


def on_leader(world: World, name: str, work: Callable[[], None]) -> None:
    """Every rank calls it; an exception is raised on all. name: unique among these ranks' work."""
    if world.world_size == 1:
        work()
        return
    waiting, key = connect_waiting(world), f"lead/{name}"
    if not world.is_leader:
        is_mistake, failure = waiting.wait_for(key, f"rank 0 ({name})")
        if failure:
            raise UserError(failure) if is_mistake else RuntimeError(f"rank 0 failed ({name}): {failure}")
        return
    outcome = (False, "")
    try:
        work()
    except BaseException as error:  # Ctrl-C, too: the others have to hear of it
        outcome = (isinstance(error, UserError), str(error) or repr(error))
        raise
    finally:
        waiting.publish(key, outcome)


ROLL_CALL_SECONDS = 5.0
"""A timed-out rank polls so long for other timed-out ranks; time-outs end at nearly the same time."""


@contextmanager
def naming_absent_ranks(world: World) -> Iterator[None]:
    """Turns a collective's time-out into RankAwaited, which names the ranks that did not time out."""
    try:
        yield
    except RuntimeError as error:
        if world.world_size == 1 or "timed out" not in str(error).lower():
            raise
        absent = _call_the_roll(world)
        names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        raise RankAwaited(
            f"rank {world.rank} has waited {world.timeout_seconds:g} s (run.timeout_seconds) in a collective "
            f"for {names if absent else 'nobody: all ranks waited'}"
        ).with_traceback(error.__traceback__) from None


def _call_the_roll(world: World) -> list[int]:
    roll, deadline = PrefixStore("waited", world.store), time.monotonic() + ROLL_CALL_SECONDS
    roll.set(str(world.rank), "here")
    while True:
        absent = [rank for rank in range(world.world_size) if read_now(roll, str(rank)) == ABSENT]
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(_LONGEST_PAUSE)


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """A UserError of one rank is raised on all."""
    result, failure = None, ""
    try:
        result = work()
    except UserError as error:
        failure = str(error)
    if first := next(filter(None, gather_objects(world, failure)), None):
        raise UserError(first)
    return cast(T, result)
