"""How launcher and ranks react to SIGINT, SIGTERM and the death of a rank.

    terminal, kill ──▶ Supervisor, a thread of the launcher ──▶ sets SharedStop; kills at the second Ctrl-C
                            ▲ sees SharedStop set, and in which order the ranks end
    terminal, kill ──▶ a thread of every rank ───────────────▶ sets SharedStop, which every rank's entry polls
    torch's agent  ──▶ the same thread: another rank failed ──▶ the rank leaves at once

Without this module a rank would die of KeyboardInterrupt in the middle of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
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
REPEAT_SECONDS = 1.0
"""Two signals within this time count as one: torchrun repeats the terminal's SIGINT."""


class SharedStop:
    """The first signal of a launch, in shared memory without a lock, which a killed process might keep.
    Raises UserError where the system gives no memory."""

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
        """is_shown: this rank's live lines show the request, and would overwrite another line."""
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
    """Prints to stderr. If it is closed (`2>&1 | head`), the line is lost without an error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(hide(visible(f"tlt: {text}\n")))
        sys.stderr.flush()


def restore_terminal() -> None:
    """After a kill: removes the last live line, and shows the cursor again."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                stream.write("\r\x1b[2K\x1b[?25h")
                stream.flush()
            return


def _ended_at_once(go_on: str) -> str:
    return "stopped at once; the step under way is lost" + (f"; go on with: {go_on}" if go_on else "")


# -- one rank, in the process of the command -----------------------------------------------------------------


@contextmanager
def handling_stop_signals(stop: StopRequest, go_on: str = "") -> Iterator[None]:
    """A second Ctrl-C, more than a second later, ends the process at once."""
    received_at = float("-inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if stop.signal is not None and number == signal.SIGINT and now - received_at > REPEAT_SECONDS:
            restore_terminal()
            say(_ended_at_once(go_on))
            os._exit(128 + number)
        if stop.signal is None:
            received_at = now
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


def listen_as_rank(stop: StopRequest, launcher: int) -> threading.Event:
    """Hears signals and notices the launcher's death, in threads. Returns the event that the rank sets when
    its entry has returned.

    The rank inherits blocked signals (see `Supervisor`), and they stay blocked: a thread hears them even
    while the main thread waits in a collective.

    launcher: its process id, from the launcher itself; after its death the parent is another.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGTERM)
    is_finished = threading.Event()
    threading.Thread(target=_hear_signals, args=(launcher, stop), daemon=True).start()
    threading.Thread(target=_leave_when_orphaned, args=(launcher, stop, is_finished), daemon=True).start()
    return is_finished


def _hear_signals(launcher: int, stop: StopRequest) -> None:
    """A SIGTERM of the launcher ends the process: its agent ends this rank because another failed."""
    while True:
        heard = signal.sigwaitinfo(STOP_SIGNALS)
        if heard.si_signo == signal.SIGTERM and heard.si_pid == launcher:
            os._exit(128 + signal.SIGTERM)
        stop.ask(signal.Signals(heard.si_signo))


def _leave_when_orphaned(
    launcher: int, stop: StopRequest, is_finished: threading.Event, grace_seconds: float = GRACE_SECONDS
) -> None:
    """Ends the process after its entry or the grace period: torch's wrapper would wait forever for a launcher
    that reads its return value."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    stop.signal = signal.SIGTERM
    is_finished.wait(grace_seconds)
    os._exit(128 + signal.SIGTERM)


# -- the launcher of several ranks ---------------------------------------------------------------------------


class Supervisor(threading.Thread):
    """Hears SIGINT and SIGTERM, and sees ranks end, while the main thread is in torch's agent.

    The main thread blocks both signals, and the ranks inherit that, so a Ctrl-C waits until they have
    imported and listen. Python writes the signals' numbers to a socket (wakeup fd), which this thread reads
    even while the main thread is inside C++.

    deaths: groups of ranks that ended together, in the order of time. The first death wakes this
        thread before the agent ends the other ranks, so the first group holds the cause.
    """

    def __init__(self, num_ranks: int, grace_seconds: float, go_on: str = "") -> None:
        super().__init__(name="tlt-supervisor", daemon=True)
        self.stop = SharedStop()
        self.has_killed = False
        self.processes: list[BaseProcess] = []
        self.deaths: list[list[int]] = []
        self.num_ranks, self._grace_seconds, self._go_on = num_ranks, grace_seconds, go_on
        self._others = set(multiprocessing.active_children())
        self._alive: dict[int, int] = {}  # file descriptor that becomes readable when a rank ends ─▶ rank
        self._lock = threading.Lock()  # for processes, deaths and _alive
        self._is_stopping = False
        self._deadline, self._repeats_until = float("inf"), float("-inf")
        self._read, self._write = socket.socketpair()

    def __enter__(self) -> Supervisor:
        # started later by the first rank, it would unblock the signals (Python 3.11)
        resource_tracker.ensure_running()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._previous_handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        self.start()
        self._previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._write.close()
        self.join()
        self._read.close()

    def run(self) -> None:
        while True:
            ready = multiprocessing.connection.wait([self._read, *self._alive], timeout=0.1)
            self._note_deaths([end for end in ready if isinstance(end, int)])
            if self._read in ready:
                numbers = self._read.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in STOP_SIGNALS:
                        self._hear(signal.Signals(number))
            if self.stop.heard is not None and not self._is_stopping:
                self._begin_stop()
                self._repeats_until = time.monotonic() + REPEAT_SECONDS  # a Ctrl-C reaches all processes
            if len(self.processes) < self.num_ranks:
                self._find_ranks()
            if time.monotonic() > self._deadline and not self.has_killed:
                late = f"not finished after {self._grace_seconds:g} s"
                self._kill(f"{late}: the ranks were killed; the step under way is lost")

    def forget_ranks(self) -> None:
        """Call it from the main thread when the last attempt's ranks have ended."""
        with self._lock:
            self._others = set(multiprocessing.active_children())
            self.processes, self.deaths, self._alive = [], [], {}
        self.stop.is_shown = False

    def _note_deaths(self, ends: list[int]) -> None:
        with self._lock:
            if dead := sorted(self._alive.pop(end) for end in ends if end in self._alive):
                self.deaths.append(dead)
                self._wake()

    def _find_ranks(self) -> None:
        """The agent does not expose the ranks, but their processes' names end in their numbers."""
        with self._lock:
            children = set(multiprocessing.active_children()) - self._others
            if len(children) == self.num_ranks:
                self.processes = sorted(children, key=lambda process: int(process.name.rpartition("-")[2]))
                self._alive = {process.sentinel: rank for rank, process in enumerate(self.processes)}

    def _hear(self, number: signal.Signals) -> None:
        if not self._is_stopping:
            self.stop.set(number)
            self._begin_stop()
        elif number == signal.SIGINT and not self.has_killed and time.monotonic() > self._repeats_until:
            self._kill(_ended_at_once(self._go_on))

    def _begin_stop(self) -> None:
        self._is_stopping = True
        self._deadline = time.monotonic() + self._grace_seconds
        if not self.stop.is_shown:
            say(STOPPING)
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        """Continues ranks stopped by SIGSTOP, so that they can finish their step or leave."""
        for rank in self._alive.values():
            pid = self.processes[rank].pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _kill(self, message: str) -> None:
        self.has_killed = True
        for child in multiprocessing.active_children():
            child.kill()
        restore_terminal()
        say(message)
