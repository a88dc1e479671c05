"""Finds the processes that a command has left behind: its descendants in any session, also those whose
parents have ended. Reward workers import this, so it imports nothing heavy.

    adopt_orphans()           once, in the process that starts commands: it becomes the parent of orphans
    left_behind(5, known)     after a command has ended: descendants that still live after so many seconds
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")


def processes() -> dict[int, tuple[int, bool]]:
    """Returns all processes of the machine: number → (parent, whether it lives; else it waits to be waited
    for)."""
    found: dict[int, tuple[int, bool]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            found[int(folder.name)] = int(parent), state not in "ZX"
    return found


def descendants(parent: int) -> list[int]:
    """Returns the living processes that descend from this one, which is left out; a parent comes before
    its children."""
    all_of_them, found = processes(), [parent]
    for process in found:
        found += sorted(child for child, (of, lives) in all_of_them.items() if of == process and lives)
    return found[1:]


def children(parent: int) -> list[int]:
    """Returns the children of a process, living or to be waited for, the oldest first."""
    return sorted(child for child, (of, _) in processes().items() if of == parent)


def parent(process: int) -> int:
    """Returns the parent of a process."""
    return processes()[process][0]


def left_behind(patience: float, known: Collection[int] = ()) -> list[str]:
    """Returns the command lines of this process's descendants, but for the children `known` and theirs,
    that still live after so many seconds; kills them. New children that have ended are waited for."""
    deadline = time.monotonic() + patience
    while True:
        reap(known)
        others = {one for child in known for one in (child, *descendants(child))}
        living = [process for process in descendants(os.getpid()) if process not in others]
        if not living or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = [command_line(process)[:200] for process in living]
    kill(living)
    reap(known)
    return found


def reap(known: Collection[int]) -> None:
    """Waits for the children that have ended, but for those of somebody else."""
    for child in {*children(os.getpid())}.difference(known):
        with suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def kill(doomed: list[int]) -> None:
    """Kills these processes and their descendants, a stopped one, too."""
    for process in [one for parent in doomed for one in (parent, *descendants(parent))]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def command_line(process: int) -> str:
    """Returns what a process runs, as one types it."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return " ".join(word.decode(errors="replace") for word in words if word)
