"""The c10d Store as ranks find it: opened, read without waiting, and met on, so that all agree which attempt
theirs is. Knows no launcher and no work.

    rank r    hello/r = its token                    ─▶ waits for a roster with its token ─▶ here/N/r ─▶ waits for go/N
    rank 0    gathers a token of every rank ─▶ roster/N, latest = N ─▶ waits for here/N/… ─▶ go/N
                       ▲                                                     │
                       └────── N + 1, where a rank has said hello anew ◀─────┘
    stop      the signal that a rank has heard, for all
    later     whoever sees that one more has said hello leaves: it was started again, and this attempt is over

torchrun keeps one store through all restarts of a run, and its machines do not count restarts alike. So
nothing but a token that a process has just drawn tells it from the one that died in its place, and nothing
that an earlier attempt has left in the store is read by a later one: everything else lies under the prefix
of the attempt.
"""

from __future__ import annotations

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

from tlt.launch.failures import leave
from tlt.launch.place import Place
from tlt.launch.signals import StopRequest, say
from tlt.types import UserError

ABSENT = b"-"
"""The value that `read_now` gives for a key that the store does not hold."""
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 1.0


def read_now(store: Store, key: str) -> bytes:
    """Returns a key's value, or ABSENT, without waiting for it to appear (`get` would)."""
    value: bytes = store.compare_set(key, ABSENT.decode(), ABSENT.decode())
    return value


def open_store(place: Place, timeout_seconds: float) -> Store:
    """Returns the ranks' part of the store of the launcher, or of rank 0, which opens it then. Raises
    UserError where nobody answers there."""
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
        what = "cannot be opened" if place.is_server else f"nobody answered within {timeout_seconds:g} s"
        reason = str(error).splitlines()[0]
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT: {where} {what} ({reason}); every rank needs rank 0's address"
        ) from None
    return PrefixStore(place.secret, store) if place.secret else store


def _listen(place: Place) -> int | None:
    """Opens the store's port to this machine alone, where the ranks meet at an address of its own. None:
    torch opens it to all networks, and that is said, for the store asks nobody who they are."""
    if place.master_addr != "localhost" and not place.master_addr.startswith("127."):
        say(
            f"the ranks' store listens on port {place.master_port} of all networks; keep it to one that you "
            "trust"
        )
        return None
    return socket.create_server((place.master_addr, place.master_port)).detach()


@dataclass(frozen=True)
class Attempt:
    """The attempt in which ranks have met. number: 1 or more.
    num_hellos: how often any rank had said hello by then."""

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
    """Returns this attempt, when all ranks have come. Raises UserError that names those that have not
    within the time-out."""
    token, deadline = uuid.uuid4().hex, clock() + timeout_seconds
    meeting = PrefixStore("meeting", store)
    meeting.add("hellos", 1)
    meeting.set(f"hello/{rank}", token)
    number, roster = 0, [""] * world_size
    while True:
        num_hellos = meeting.add(
            "hellos", 0
        )  # before the tokens are read: who comes after that is one too many
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
    """Returns the part of the store that this attempt alone reads and writes."""
    return PrefixStore(f"attempt{attempt.number}", store)


def is_over(store: Store, attempt: Attempt) -> bool:
    """Whether a rank was started again since."""
    return PrefixStore("meeting", store).add("hellos", 0) > attempt.num_hellos


@dataclass(frozen=True)
class Watch:
    """What the threads share that end this process from whatever it waits for. has_left: to be set where it
    ends by itself.
    has_answered: set whenever the store has answered."""

    has_left: threading.Event = field(default_factory=threading.Event)
    has_answered: threading.Event = field(default_factory=threading.Event)


def leave_when_over(store: Store, attempt: Attempt) -> Watch:
    """Starts a thread that ends this process once another attempt begins: a launcher sees those die that
    it has started, not those on other machines."""
    connection: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    watch = Watch()

    def look() -> None:
        while not watch.has_left.wait(_WATCH_SECONDS):
            try:
                over = is_over(connection, attempt)
            except RuntimeError:  # the store is gone, and with it its launcher or rank 0: others see to that
                return
            watch.has_answered.set()
            if over:
                leave("another rank was started again, which is the end of this attempt")

    threading.Thread(target=look, name="tlt-attempt", daemon=True).start()
    return watch


def share_stop(store: Store, stop: StopRequest, watch: Watch) -> None:
    """Starts a thread by which a signal that one rank has heard reaches all of the attempt: whoever has
    started them may send it to one alone, which would stop in the middle of a phase, and wait there for the
    others to come.

    store: the attempt's.
    """
    connection: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs

    def look() -> None:
        while not watch.has_left.wait(_WATCH_SECONDS):
            try:
                heard = read_now(connection, "stop")
                if stop.signal is not None:
                    connection.set("stop", str(int(stop.signal)))
                    return
            except RuntimeError:  # the store is gone: `leave_when_silent` and the next collective see to that
                return
            if heard != ABSENT:
                stop.ask(signal.Signals(int(heard)))
                return

    threading.Thread(target=look, name="tlt-stop", daemon=True).start()


def leave_when_silent(watch: Watch, timeout_seconds: float, whose: str) -> None:
    """Starts a thread that ends this process where the store has not answered for so long: whoever asks a
    store over a network that is gone waits for the network's own time-out, a quarter of an hour. Rounds are
    counted, so that a process which was stopped for a while finds the store as it left it.

    whose: the store's address, to be named.
    """

    def look() -> None:
        silent = 0.0
        while not watch.has_left.wait(_WATCH_SECONDS):
            silent = 0.0 if watch.has_answered.is_set() else silent + _WATCH_SECONDS
            watch.has_answered.clear()
            if silent > timeout_seconds:
                leave(
                    f"the store of rank 0 at {whose} has not answered for {silent:g} s (run.timeout_seconds)"
                )

    threading.Thread(target=look, name="tlt-store", daemon=True).start()


def _missing(meeting: Store, number: int, roster: Sequence[str]) -> list[int]:
    """Returns the ranks that have not answered to the roster."""
    return [
        rank
        for rank, token in enumerate(roster)
        if read_now(meeting, f"here/{number}/{rank}").decode() != token
    ]


def _refuse(meeting: Store, rank: int, number: int, roster: Sequence[str], timeout_seconds: float) -> None:
    said = [read_now(meeting, f"hello/{other}") != ABSENT for other in range(len(roster))]
    absent = [other for other, has_said in enumerate(said) if not has_said] or _missing(
        meeting, number, roster
    )
    names = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    raise UserError(
        f"ranks: {len(absent)} of {len(roster)} did not come within {timeout_seconds:g} s (rank {names}; "
        f"rank {rank} waited); "
        "start all of them, or raise run.timeout_seconds"
    )
