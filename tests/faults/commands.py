"""Runs a command as somebody types it, in a session of its own, and says how it ended: exit code, what it
said, what it left running. A fork of this process has imported everything already; a new Python begins as a
user's does.

    adopt_orphans()     once, before the first
    run(command, 120)   a command that takes longer is killed, with all it has started
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.left import adopt_orphans, children, kill, left_behind

__all__ = ["Command", "Ending", "adopt_orphans", "run"]
MOST_BYTES = 12 * 2**30
"""Address space of a process: one that reads without end is a fault of its own, not the end of its
neighbours."""
STREAMS = ("pipe", "closed", "full", "gone")
"""What standard output can be: read to its end; no open file; a full disk; a pipe that nobody reads."""


@dataclass(frozen=True)
class Command:
    """What is run. call: a function in a fork of this process, which returns the exit code; or words: those
    of a new process.
    environ: changes of the environment; None: not set.
    stdin, stdout, stderr: `STREAMS`; a pipe as input is at its end."""

    folder: Path
    call: Callable[[], int] | None = None
    words: tuple[str, ...] = ()
    environ: Mapping[str, str | None] = field(default_factory=dict)
    stdin: str = "pipe"
    stdout: str = "pipe"
    stderr: str = "pipe"


@dataclass(frozen=True)
class Ending:
    """code: as a shell shows it, 128 + n after signal n; None: it took too long.
    left: what it left running."""

    code: int | None
    out: str
    err: str
    left: tuple[str, ...]
    seconds: float


def run(
    command: Command, limit: float, patience: float = 5.0, meanwhile: Callable[[int], None] | None = None
) -> Ending:
    """Runs a command to its end. patience: seconds that its processes have to follow it.
    meanwhile: called with the number of its process again and again while it runs."""
    files = [command.folder / name for name in (".said-out", ".said-err")]
    for file in files:
        file.unlink(missing_ok=True)
    began = time.monotonic()
    known = children(os.getpid())
    process = _start(command, files)
    status = None
    while status is None and time.monotonic() - began < limit:
        time.sleep(0.01)
        if meanwhile is not None:
            meanwhile(process)
        ended, waited = os.waitpid(process, os.WNOHANG)
        status = waited if ended else None
    seconds = time.monotonic() - began
    if status is None:
        kill([process])
        os.waitpid(process, 0)
        left_behind(0.0, known)
        return Ending(None, *_said(files), (), seconds)
    code = os.waitstatus_to_exitcode(status)
    return Ending(
        code if code >= 0 else 128 - code, *_said(files), tuple(left_behind(patience, known)), seconds
    )


def _said(files: list[Path]) -> tuple[str, str]:
    out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    return out, err


def _start(command: Command, files: list[Path]) -> int:
    """Starts the command; returns its process."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of other threads, which do nothing here that the child needs
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        _connect(command, files)
        _set_environment(command.environ)
        os.chdir(command.folder)
        if command.call is None:
            os.execve(command.words[0], command.words, os.environ)
        code = _call(command.call)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _connect(command: Command, files: list[Path]) -> None:
    for number, kind, file in (
        (0, command.stdin, None),
        (1, command.stdout, files[0]),
        (2, command.stderr, files[1]),
    ):
        if kind == "closed":
            os.close(number)
            continue
        if kind == "full":
            end = os.open("/dev/full", os.O_RDWR)
        elif kind == "gone":
            theirs, end = os.pipe()
            os.close(theirs)
        elif file is None:
            end = os.open(os.devnull, os.O_RDONLY)
        else:
            end = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(end, number)
        os.close(end)


def _set_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _call(call: Callable[[], int]) -> int:
    """Calls it as Python runs a program: finding modules here and on PYTHONPATH, with streams of its own,
    its threads awaited, what is to be done at exit done."""
    atexit._clear()  # what is to be done when this process's parent ends, such as removing the folder of all
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # typeshed leaves private names out
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        code = call()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # typeshed leaves private names out
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:  # as Python ends then
        print(f"Exception ignored in: {sys.stdout!r}\n{type(error).__name__}: {error}", file=sys.stderr)
        code = code or 120
    return code
