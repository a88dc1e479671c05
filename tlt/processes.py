"""A helper process and the pipe to it, as the parent starts and kills it, and as it begins. Knows nothing of what it does.

    parent    Helper(…) ─▶ pipe ─▶ work()        killed with all it has started, or by the kernel once the parent is gone
    helper    begin() ─▶ the pipe's other end

Helpers import this module, so it imports nothing heavy: no torch. They are plain programs rather than multiprocessing's
children, which would import the parent's main module again, torch and more, for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from tlt.streams import forgive_output


class Helper:
    """A process that runs a function of ours. It leads a session of its own: no Ctrl-C of the terminal reaches it."""

    def __init__(
        self, function: str, *arguments: str, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None
    ) -> None:
        """Starts it. function: "package.module:name", which calls `begin`.  arguments: its sys.argv from 2 on.
        env: changes to the environment.  log: takes what it prints, which else goes where the parent's goes."""
        module, _, name = function.partition(":")
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import {name}; {name}()", str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def exit_code(self, seconds: float) -> int | None:
        """Returns the code with which it ended, for which it waits so long; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kills it and all it has started; once more does nothing. Another thread that waits on the pipe sees its end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread was faster
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def begin() -> Connection[Any, Any]:
    """Returns the helper's end of the pipe. To be called first in it."""
    forgive_output(says_so=False)  # that a reward function prints must not be a mistake of it
    if sys.platform == "linux":  # should the parent be killed while the helper hangs, the kernel ends it too
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a rank has some blocked; what the helper starts must hear them
    return Connection(int(sys.argv[1]))


def be_first_to_go() -> None:
    """Lets the kernel end this process rather than the run that started it, where the machine's memory is spent."""
    with contextlib.suppress(OSError):  # not on every system
        Path("/proc/self/oom_score_adj").write_text("1000")


def how_it_ended(exit_code: int | None) -> str:
    """Returns in words what the exit code of a process says."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
