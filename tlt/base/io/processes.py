"""A helper process with a pipe to its parent, and a keeper process between them.

    parent    Helper(…) ─▶ keeper ─▶ helper: function(pipe, …) ─▶ processes that it starts, in any session
                  └───────────pipe──────┘
    keeper    waits for the end of helper or parent, or for `Helper.kill`; kills the rest; ends as the helper

Helpers import this module: it imports nothing heavy. They are no children of multiprocessing, which would
import the parent's main module again.
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

from tlt.base.io.streams import forgive_output

MESSAGE_SECONDS = 10
"""Time limit for the rest of a begun message."""
KEEPER_SECONDS = 10.0
"""Time limit for a keeper to kill its processes; then its process group is killed."""


def this_python() -> tuple[str, str]:
    """Without -P it would import a json.py of the working directory first."""
    return sys.executable, "-P"


class Helper:
    """Runs a function in a session of its own, out of reach of a terminal's Ctrl-C."""

    def __init__(
        self,
        function: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:
        """function: "package.module:name", called with the helper's end of the pipe and the arguments.
        env: changes to the environment.
        log: takes the helper's output; None: the parent's stdout and stderr.
        """
        self.pipe, theirs = Pipe()
        _bound(self.pipe)
        self._lock = threading.Lock()  # only one thread may reap the process
        words = [str(theirs.fileno()), str(os.getpid()), function, *arguments]
        self._process = subprocess.Popen(
            [*this_python(), "-c", "from tlt.base.io.processes import begin; begin()", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def end(self, seconds: float) -> int | None:
        """Kills the helper after `seconds`. Returns its exit code; None: killed."""
        has_ended = self._ends_within(seconds)
        self.kill()
        return self._process.returncode if has_ended else None

    def kill(self) -> None:
        """Kills the helper and its descendants. A thread that reads the pipe sees its end."""
        with self._lock:
            if self._process.returncode is not None:
                return
            if not self._ends_within(0.0):
                os.kill(self._process.pid, signal.SIGTERM)
                os.kill(self._process.pid, signal.SIGCONT)  # for a keeper that was stopped
                self._ends_within(KEEPER_SECONDS)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a keeper that was killed has left processes
            self._process.wait()

    def _ends_within(self, seconds: float) -> bool:
        """Waits without reaping: until then no other process can get its pid, which is also its group's."""
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _has_ended(self) -> bool:
        if sys.platform != "linux":  # other systems do not tell without reaping
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has reaped it
            return True


def _bound(pipe: Connection[Any, Any]) -> None:
    """Limits the wait for the rest of a message; then reads and writes raise BlockingIOError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))


def how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


# ── in the helper ───────────────────────────────────────────────────────────────────────────────────────────


def begin() -> None:
    """Forks the helper and becomes its keeper. Nothing is imported before the fork: an import may hang, and
    the parent may be killed meanwhile."""
    number, parent, function, *arguments = sys.argv[1:]
    _end_with(int(parent), signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper = os.getpid()
    if helper := os.fork():
        os.close(int(number))
        _keep(helper)
    _end_with(keeper, signal.SIGKILL)
    # The run says when the helper ends. A handler, unlike SIG_IGN, is not inherited by programs that it
    # starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a rank has some blocked, too
    forgive_output(says_so=False)  # a reward function may print
    pipe: Connection[Any, Any] = Connection(int(number))
    # A program or fork that held the pipe would keep it open after the helper's end; a fork could even
    # answer.
    os.set_inheritable(int(number), False)
    os.register_at_fork(after_in_child=pipe.close)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(pipe, *arguments)


def be_first_to_go() -> None:
    """Out of memory, the kernel kills this process before the run that started it."""
    with contextlib.suppress(OSError):  # not on every system
        Path("/proc/self/oom_score_adj").write_text("1000")


# ── in its keeper ───────────────────────────────────────────────────────────────────────────────────────────


def _keep(helper: int) -> NoReturn:
    """SIGTERM comes from `Helper.kill`, or from the kernel at the parent's end."""
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
    ended = {}
    with contextlib.suppress(ChildProcessError):  # none is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill_children() -> None:
    """A killed child's children become this process's (subreaper, on Linux): repeats until none is left."""
    with contextlib.suppress(
        ChildProcessError, FileNotFoundError
    ):  # none is left; no such list on this system
        while True:
            for pid in Path("/proc/thread-self/children").read_text().split():
                with contextlib.suppress(PermissionError):  # it is another user's now, and is waited for
                    os.kill(int(pid), signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # the helper has written its core already
        with contextlib.suppress(OSError):  # SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
    os._exit(code)


# ── the kernel's part ───────────────────────────────────────────────────────────────────────────────────────

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
"""From linux/prctl.h."""


def _end_with(parent: int, number: signal.Signals) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
