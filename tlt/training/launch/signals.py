"""How launcher and ranks react to SIGINT, SIGTERM and the death of a rank.

terminal, kill ──▶ Supervisor, in the launcher ──▶ sets SharedStop; kills at the second Ctrl-C
                        ▲ sees SharedStop set, and which rank ends first
terminal, kill ──▶ a thread of every rank ───────▶ sets SharedStop, which every rank's entry polls
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.types import UserError
from tlt.training.launch.place import find_place

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 120.0
"""Seconds for ranks to finish after the first signal or their launcher's death."""
STOPPING = "stopping after the work under way; Ctrl-C again ends at once"
_LOST = "the step under way is lost"
REPEAT_SECONDS = 1.0
"""Two signals within this time count as one: torchrun repeats the terminal's SIGINT."""
_SETTLE_SECONDS = 0.1
"""After the first failure another rank may be writing a report of its own."""


class SharedStop:
    """The first signal of a launch, in shared memory without a lock, which a killed process might keep.
    Raises UserError without such memory."""

    def __init__(self) -> None:
        memory = multiprocessing.get_context("spawn")
        try:
            self._number = memory.RawValue(ctypes.c_int, 0)
            self._is_shown = memory.RawValue(ctypes.c_bool, False)
        except OSError as error:
            where = f"/dev/shm or {tempfile.gettempdir()} cannot be written ({error.strerror})"
            remedy = "make them writable, or give --run.num_ranks 1"
            raise UserError(f"run.num_ranks: ranks share memory there, and {where}; {remedy}") from None

    @property
    def heard(self) -> signal.Signals | None:
        return signal.Signals(self._number.value) if self._number.value else None

    def set(self, number: signal.Signals) -> None:
        self._number.value = self._number.value or number

    @property
    def is_shown(self) -> bool:
        return self._is_shown.value

    @is_shown.setter
    def is_shown(self, value: bool) -> None:
        self._is_shown.value = value


class StopRequest:
    """The entry polls `is_set()` (about 1 µs), finishes its step and returns."""

    def __init__(self, shared: SharedStop | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._shared = shared
        self.is_shown = False

    def show(self, is_shown: bool) -> None:
        """is_shown: live lines show the request, and would overwrite another line."""
        self.is_shown = is_shown
        if self._shared is not None:
            self._shared.is_shown = is_shown

    def is_set(self) -> bool:
        return self.signal is not None or (self._shared is not None and self._shared.heard is not None)

    def ask(self, number: signal.Signals) -> None:
        self.signal = number
        if self._shared is not None:
            self._shared.set(number)


def say(text: str) -> None:
    """To stderr; if it is closed (`2>&1 | head`), the line is lost without an error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(hide(visible(f"tlt: {text}\n")))
        sys.stderr.flush()


def restore_terminal() -> None:
    """After a kill: removes the last live line and shows the cursor."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                stream.write("\r\x1b[2K\x1b[?25h")
                stream.flush()
            return


def _ended_at_once(go_on: str) -> str:
    return f"stopped at once; {_LOST}" + (f"; go on with: {go_on}" if go_on else "")


# -- one rank, in the process of the command -----------------------------------------------------------------


@contextmanager
def handling_stop_signals(stop: StopRequest, go_on: str = "") -> Iterator[None]:
    """A second Ctrl-C, REPEAT_SECONDS later, ends the process at once."""
    received_at = float("-inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        is_second = math.isfinite(received_at)  # another machine's stop is no first one
        if is_second and number == signal.SIGINT and now - received_at > REPEAT_SECONDS:
            restore_terminal()
            say(_ended_at_once(go_on))
            os._exit(128 + number)
        received_at = received_at if is_second else now
        if stop.signal is None:
            stop.signal = signal.Signals(number)
            place = find_place()
            if (place is None or place.is_leader) and not stop.is_shown:
                say(STOPPING)

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -- one of several ranks ------------------------------------------------------------------------------------


def listen_as_rank(stop: StopRequest, launcher: int) -> None:
    """Hears signals and the launcher's death in a thread: the main thread may wait in a collective.

    launcher: its process id.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGTERM)
    threading.Thread(target=_listen, args=(stop, launcher), daemon=True).start()


def _listen(stop: StopRequest, launcher: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends the process after the grace period: its entry may wait for a dead rank."""
    while os.getppid() == launcher:
        if heard := signal.sigtimedwait(STOP_SIGNALS, 1.0):
            stop.ask(signal.Signals(heard.si_signo))
    stop.ask(signal.SIGTERM)
    time.sleep(grace_seconds)
    os._exit(128 + signal.SIGTERM)


# -- the launcher of several ranks ---------------------------------------------------------------------------


class Supervisor:
    def __init__(self, grace_seconds: float, go_on: str = "") -> None:
        self.stop = SharedStop()
        self.has_killed = False
        self._grace_seconds, self._go_on = grace_seconds, go_on
        self._is_stopping = self._ends_at_once = False
        self._deadline = self._repeats_until = float("inf")

    def __enter__(self) -> Supervisor:
        # started later by the first rank, it would unblock the signals (Python 3.11)
        resource_tracker.ensure_running()
        self._previous = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, ranks: Sequence[BaseProcess]) -> list[int]:
        """Returns the ranks that failed first; the others are killed. Empty: none failed.

        Raises OSError where the system has no room for a process.
        """
        try:
            self._start(ranks)
            alive = set(range(len(ranks)))
            while alive:
                wait([ranks[rank].sentinel for rank in alive], timeout=0.1)
                self._attend(ranks)  # first: a rank that has heard the signal may have ended already
                ended = [rank for rank in sorted(alive) if ranks[rank].exitcode is not None]
                if failed := [rank for rank in ended if ranks[rank].exitcode]:
                    time.sleep(_SETTLE_SECONDS)
                    return failed
                alive -= set(ended)
            return []
        finally:
            self._kill(ranks)
            self.stop.is_shown = False

    def _start(self, ranks: Sequence[BaseProcess]) -> None:
        """Ranks inherit blocked signals: a Ctrl-C waits until they listen."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for process in ranks:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._is_stopping:
            self.stop.set(signal.Signals(number))
            self._repeats_until = 0.0
        elif number == signal.SIGINT and time.monotonic() > self._repeats_until:
            self._ends_at_once = True

    def _attend(self, ranks: Sequence[BaseProcess]) -> None:
        now = time.monotonic()
        if self.stop.heard is not None and not self._is_stopping:
            self._is_stopping = True
            self._deadline = now + self._grace_seconds
            # where a rank has heard it first: a Ctrl-C reaches all processes
            self._repeats_until = min(self._repeats_until, now + REPEAT_SECONDS)
            if not self.stop.is_shown:
                say(STOPPING)
            for process in ranks:  # one that was stopped shall finish its step
                if process.pid is not None and process.exitcode is None:
                    os.kill(process.pid, signal.SIGCONT)
        if self._ends_at_once or now > self._deadline:
            self.has_killed = True
            self._kill(ranks)
            restore_terminal()
            late = f"not finished after {self._grace_seconds:g} s: the ranks were killed; {_LOST}"
            say(_ended_at_once(self._go_on) if self._ends_at_once else late)

    def _kill(self, ranks: Sequence[BaseProcess]) -> None:
        started = [process for process in ranks if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
