"""A helper process and the pipe to it: how the parent starts and ends it, how it begins, and who clears up
after it. Knows nothing of what it does.

    parent    Helper(…) ─▶ keeper ─▶ helper: function(pipe, …) ─▶ what it starts, in whatever session
                  └───────────pipe──────┘
    keeper    waits for the helper's end, for the parent's, or for `Helper.kill`; kills what is left; ends as the helper did

The parent starts the keeper, and the helper is its fork. A process below it whose own parent has ended
becomes the keeper's child (Linux alone): so it finds all of them.

Helpers import this module, so it imports nothing heavy: no torch. They are plain programs rather than
multiprocessing's children, which would import the parent's main module again, torch and more, for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NoReturn

from tlt.io.streams import forgive_output

MESSAGE_SECONDS = 10
"""Time limit for the rest of a message that has begun; what is longer comes from a process that has
stopped, or is none."""
KEEPER_SECONDS = 10.0
"""Time limit for a keeper to kill what it keeps; afterwards it is killed itself, with all that has not
left its group."""


class Helper:
    """A process that runs a function of ours. It has a session of its own: no Ctrl-C of the terminal
    reaches it."""

    def __init__(
        self,
        function: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:
        """Starts it. function: "package.module:name", which takes the helper's end of the pipe, and the
        arguments.
        env: changes to the environment.
        log: takes what it prints, which else goes where the parent's goes."""
        self.pipe, theirs = Pipe()
        _bound(self.pipe)
        self._lock = threading.Lock()  # of the process's end: only one thread may reap it
        words = [str(theirs.fileno()), str(os.getpid()), function, *arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tlt.io.processes import begin; begin()", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def end(self, seconds: float) -> int | None:
        """Gives it so long to end by itself, then kills it and all it has started. Returns its own exit
        code; None: killed."""
        has_ended = self._ends_within(seconds)
        self.kill()
        return self._process.returncode if has_ended else None

    def kill(self) -> None:
        """Kills it and all it has started; once more does nothing. Another thread that waits on the pipe
        sees its end."""
        with self._lock:
            if self._process.returncode is not None:
                return
            if not self._ends_within(0.0):
                for number in (
                    signal.SIGTERM,
                    signal.SIGCONT,
                ):  # the second for a keeper that somebody has stopped
                    os.kill(self._process.pid, number)
                self._ends_within(KEEPER_SECONDS)
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # a keeper that was killed could not clear up
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ends_within(self, seconds: float) -> bool:
        """Waits so long for its end, without reaping it: until then its number, which is its group's, is
        nobody else's."""
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _has_ended(self) -> bool:
        if sys.platform != "linux":  # others do not tell without reaping
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has reaped it
            return True


def _bound(pipe: Connection[Any, Any]) -> None:
    """Lets neither a read nor a write wait for ever for the other half of a message: it raises
    BlockingIOError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))


def how_it_ended(exit_code: int | None) -> str:
    """Returns in words what the exit code of a process says. None: nobody knows it."""
    if exit_code is None:
        return "exit code unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


# ── in the helper ───────────────────────────────────────────────────────────────────────────────────────────


def begin() -> None:
    """Runs in the process that `Helper` starts: forks the helper, which calls its function, and becomes
    its keeper. Before anything else is imported: an import may hang, and the parent may be killed
    meanwhile."""
    number, parent, function, *arguments = sys.argv[1:]
    _end_with(int(parent), signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper = os.getpid()
    if helper := os.fork():
        os.close(int(number))
        _keep(helper)
    _end_with(keeper, signal.SIGKILL)
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # its run says when it ends; what it starts hears SIGINT as others do
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a rank has some blocked, too
    forgive_output(says_so=False)  # that a reward function prints must not be a mistake of it
    pipe: Connection[Any, Any] = Connection(int(number))
    os.set_inheritable(
        int(number), False
    )  # else it would seem to live as long as any program that it has started,
    os.register_at_fork(after_in_child=pipe.close)  # or any fork, which could answer in its place as well
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(pipe, *arguments)


def be_first_to_go() -> None:
    """Lets the kernel end this process rather than the run that started it, where the machine's memory is
    spent."""
    with contextlib.suppress(OSError):  # not on every system
        Path("/proc/self/oom_score_adj").write_text("1000")


# ── in its keeper ───────────────────────────────────────────────────────────────────────────────────────────


def _keep(helper: int) -> NoReturn:
    """Waits for the helper's end, or for SIGTERM, by `Helper.kill` or since the parent is gone. Kills what
    is left, and ends as the helper did."""
    code = None
    while code is None:
        if signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGCHLD:
            code = _reap().get(helper)
        else:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
            code = -signal.SIGTERM
    _kill_children()
    _end_as(code)


def _reap() -> dict[int, int]:
    """Returns the children that have ended, with their exit codes."""
    ended = {}
    with contextlib.suppress(ChildProcessError):  # none is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill_children() -> None:
    """Kills all children, then theirs, which have become its own, until there is none."""
    with contextlib.suppress(
        ChildProcessError, FileNotFoundError
    ):  # none is left; no such list on this system
        while True:
            for pid in Path("/proc/thread-self/children").read_text().split():
                with contextlib.suppress(PermissionError):  # another user's by now: it is waited for
                    os.kill(int(pid), signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)


def _end_as(code: int) -> NoReturn:
    """Ends this process with an exit code, or by a signal where it is negative."""
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # the helper has left its core already
        with contextlib.suppress(OSError):  # SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
    os._exit(code)


# ── the kernel's part ───────────────────────────────────────────────────────────────────────────────────────

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
"""Of linux/prctl.h."""


def _end_with(parent: int, number: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent dies, and ends it where that has happened
    already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
