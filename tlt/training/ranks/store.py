"""The ranks' c10d Store, and the rendezvous of an attempt's ranks on it.

    rank r    hello/r = its token           ─▶ waits for a roster with its token ─▶ here/N/r ─▶ waits for go/N
    rank 0    gathers every rank's token ─▶ roster/N, latest = N ─▶ waits for here/N/… ─▶ go/N
                       ▲                                                  │
                       └────── N + 1, if a rank has said hello anew ◀─────┘
    stop      a signal that a rank has heard, for all
    later     another hello: a rank was started again, so all others leave

torchrun keeps one store through all restarts, and machines do not count restarts alike. So a random token
tells each process from its dead predecessor.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from tlt.base.types import UserError
from tlt.training.launch.failures import leave
from tlt.training.launch.place import Place
from tlt.training.launch.signals import StopRequest, say

ABSENT = b"-"
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 1.0


def read_now(store: Store, key: str) -> bytes:
    """Returns ABSENT where `get` would wait."""
    value: bytes = store.compare_set(key, ABSENT.decode(), ABSENT.decode())
    return value


def open_store(place: Place, timeout_seconds: float) -> Store:
    """UserError if nobody answers; OSError if the port that Ray's driver found is taken: the restart takes
    another."""
    where, timeout = f"{place.master_addr}:{place.master_port}", timedelta(seconds=timeout_seconds)
    try:
        store = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=place.is_server,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=_listen(place) if place.is_server else None,
        )
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        if place.is_server and place.secret:
            raise
        what = "cannot be opened" if place.is_server else f"nobody answered within {timeout_seconds:g} s"
        reason = str(error).splitlines()[0]
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT: {where} {what} ({reason}); every rank needs rank 0's address"
        ) from None
    return PrefixStore(place.secret, store) if place.secret else store


def _listen(place: Place) -> int | None:
    """None: torch opens a port to all networks; the user is told, because the store does not authenticate."""
    if place.listening is not None:
        return place.listening
    if place.master_addr != "localhost" and not place.master_addr.startswith("127."):
        say(
            f"the ranks' store listens on port {place.master_port} of all networks; "
            "keep it to one that you trust"
        )
        return None
    return socket.create_server((place.master_addr, place.master_port)).detach()


@dataclass(frozen=True)
class Attempt:
    number: int
    num_hellos: int


def meet(
    store: Store,
    rank: int,
    world_size: int,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Attempt:
    """Raises UserError, which names the missing ranks."""
    token, deadline = uuid.uuid4().hex, clock() + timeout_seconds
    meeting = PrefixStore("meeting", store)
    meeting.add("hellos", 1)
    meeting.set(f"hello/{rank}", token)
    number, roster = 0, [""] * world_size
    while True:
        num_hellos = meeting.add("hellos", 0)  # before the tokens: a hello in between ends the attempt
        if rank == 0:
            tokens = [read_now(meeting, f"hello/{other}").decode() for other in range(world_size)]
            if ABSENT.decode() not in tokens and tokens != roster:
                number, roster = meeting.add("number", 1), tokens
                meeting.set(f"roster/{number}", json.dumps(roster))
                meeting.set("latest", str(number))
        elif (latest := read_now(meeting, "latest")) != ABSENT and int(latest) > number:
            number, roster = int(latest), json.loads(meeting.get(f"roster/{int(latest)}"))
        if len(roster) == world_size and roster[rank] == token:
            meeting.set(f"here/{number}/{rank}", token)
            if rank == 0 and not _missing(meeting, number, roster):
                meeting.set(f"go/{number}", str(num_hellos))
            if (go := read_now(meeting, f"go/{number}")) != ABSENT:
                return Attempt(number, int(go))
        if clock() > deadline:
            _refuse(meeting, rank, number, roster, timeout_seconds)
        sleep(_POLL_SECONDS)


def attempt_store(store: Store, attempt: Attempt) -> Store:
    return PrefixStore(f"attempt{attempt.number}", store)


def is_over(store: Store, attempt: Attempt) -> bool:
    return PrefixStore("meeting", store).add("hellos", 0) > attempt.num_hellos


@dataclass(frozen=True)
class Watch:
    """has_left: set when the process ends by itself."""

    has_left: threading.Event = field(default_factory=threading.Event)
    has_answered: threading.Event = field(default_factory=threading.Event)


def leave_when_over(store: Store, attempt: Attempt) -> Watch:
    """Ends this process: its launcher does not see the death of ranks on other machines."""
    connection, watch = clone(store), Watch()

    def look() -> bool:
        over = is_over(connection, attempt)
        watch.has_answered.set()
        if over:
            leave("another rank was started again, which is the end of this attempt")
        return True

    _start_looking(watch, "tlt-attempt", look)
    return watch


def share_stop(store: Store, stop: StopRequest, watch: Watch) -> None:
    """Passes one rank's signal on to all: this rank alone would stop within a phase, and wait there for the
    others."""
    connection = clone(store)

    def look() -> bool:
        heard = read_now(connection, "stop")
        if stop.signal is not None:
            connection.set("stop", str(int(stop.signal)))
            return False
        if heard != ABSENT:
            stop.ask(signal.Signals(int(heard)))
        return heard == ABSENT

    _start_looking(watch, "tlt-stop", look)


def leave_when_silent(watch: Watch, timeout_seconds: float, whose: str) -> None:
    """The network's own time-out is a quarter of an hour. Counts rounds, not the clock: a suspended process
    does not leave."""
    silent = 0.0

    def look() -> bool:
        nonlocal silent
        silent = 0.0 if watch.has_answered.is_set() else silent + _WATCH_SECONDS
        watch.has_answered.clear()
        if silent > timeout_seconds:
            leave(f"the store of rank 0 at {whose} has not answered for {silent:g} s (run.timeout_seconds)")
        return True

    _start_looking(watch, "tlt-store", look)


def _start_looking(watch: Watch, name: str, look: Callable[[], bool]) -> None:
    def run() -> None:
        with contextlib.suppress(RuntimeError):
            while not watch.has_left.wait(_WATCH_SECONDS) and look():
                pass

    threading.Thread(target=run, name=name, daemon=True).start()


def clone(store: Store) -> Store:
    """A wait on another connection does not block this one."""
    connection: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return connection


def _missing(meeting: Store, number: int, roster: Sequence[str]) -> list[int]:
    here = [read_now(meeting, f"here/{number}/{rank}").decode() for rank in range(len(roster))]
    return [rank for rank, token in enumerate(roster) if here[rank] != token]


def _refuse(meeting: Store, rank: int, number: int, roster: Sequence[str], timeout_seconds: float) -> None:
    silent = [other for other in range(len(roster)) if read_now(meeting, f"hello/{other}") == ABSENT]
    absent = silent or _missing(meeting, number, roster)
    names = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    raise UserError(
        f"ranks: {len(absent)} of {len(roster)} did not come within {timeout_seconds:g} s (rank {names}; "
        f"rank {rank} waited); start all of them, or raise run.timeout_seconds"
    )
