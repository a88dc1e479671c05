"""Finds the processes that a command has left behind: its descendants, whatever sessions they have begun and whoever of their
parents is gone. Knows nothing of what they are.

    adopt_orphans()    once, in the process that starts commands: whose parent ends is its child from then on
    left_behind(5)     after a command has ended: what else lives still, after so many seconds at most
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")


def descendants(parent: int) -> list[int]:
    """Returns the living processes that descend from this one, which is left out; a parent comes before its children."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, of = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(folder.name)] = int(of)
    found = [parent]
    for process in found:
        found += sorted(child for child, of in parents.items() if of == process)
    return found[1:]


def left_behind(patience: float, known: frozenset[int] = frozenset()) -> list[str]:
    """Returns the command lines of this process's descendants, but for those `known` and their children, that still live after
    so many seconds; kills them. Children that have ended are waited for."""
    deadline = time.monotonic() + patience
    while True:
        reap()
        mine = {child for one in known for child in (one, *descendants(one))}
        living = [process for process in descendants(os.getpid()) if process not in mine]
        if not living or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = [command_line(process) for process in living]
    kill(living)
    reap()
    return found


def reap() -> None:
    """Waits for all children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill(processes: list[int]) -> None:
    """Kills these processes and their descendants, a stopped one, too."""
    for process in [one for parent in processes for one in (parent, *descendants(parent))]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def command_line(process: int) -> str:
    """Returns what a process runs, as one types it."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return " ".join(word.decode(errors="replace") for word in words if word)[:200]
