"""Starts the ranks of a run on this machine, restarts them if one has died, and reports why they ended.

tlt train ── launch ─┬─ this process is a rank (place.py), or there is one rank: runs the entry here
                     └─ Supervisor (signals.py) ─┬─ rank 0: entry(argument, stop)
                          hears signals          └─ rank 1: entry(argument, stop)
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from tlt.base.io.processes import how_it_ended
from tlt.base.io.streams import forgive_output
from tlt.base.types import UserError
from tlt.training.launch.failures import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USER_ERROR,
    REPORTS,
    AttemptFailure,
    RankFailure,
    Restarts,
    find_cause,
)
from tlt.training.launch.place import LISTENING, SECRET, find_place
from tlt.training.launch.signals import (
    GRACE_SECONDS,
    SharedStop,
    StopRequest,
    Supervisor,
    handling_stop_signals,
    listen_as_rank,
    restore_terminal,
    say,
)

Entry = Callable[[str, StopRequest], object]
_LOOPBACK = "127.0.0.1"
START_METHOD = "spawn"
"""Of the ranks' processes; tests fork them, which saves their imports."""


def launch(
    argument: str,
    num_ranks: int,
    entry: Entry | str,
    threads_per_rank: int = 1,
    grace_seconds: float = GRACE_SECONDS,
    restarts: Restarts | None = None,
    go_on: str = "",
) -> int:
    """Runs `entry(argument, stop)` on every rank and returns the command's exit code.

        0           all ranks returned
        1           a rank failed; stderr has its traceback, or names the killed rank
        2           a rank raised UserError; its line is on stderr
        130, 143    stopped by SIGINT, SIGTERM

    entry: an importable function, or "package.module:function".
    grace_seconds: from the first signal until the ranks are killed.
    go_on: the command that continues the run.
    """
    if num_ranks < 1:
        raise UserError(f"ranks: {num_ranks} is too few; give 1 or more")
    if is_rank(num_ranks):
        return run_here(argument, entry, go_on)
    assert threading.current_thread() is threading.main_thread(), "signals are heard in the main thread only"
    restarts = restarts or Restarts()
    with _environment(threads_per_rank), Supervisor(grace_seconds, go_on) as supervisor:
        while True:
            ending = _attempt(argument, num_ranks, entry, supervisor)
            if isinstance(ending, int):
                return ending
            restore_terminal()
            if supervisor.stop.heard is not None:
                if ending.is_awaiting:
                    say(f"{'; '.join(ending.causes)}; the step under way is lost")
                    return _exit_code(supervisor.stop.heard)
                restarts.limit = 0
            if not restarts.follows(ending):
                return EXIT_USER_ERROR if ending.is_user_error else EXIT_FAILURE


def is_rank(num_ranks: int) -> bool:
    return num_ranks == 1 or find_place() is not None


# -- one rank, in this process -------------------------------------------------------------------------------


def run_here(argument: str, entry: Entry | str, go_on: str = "") -> int:
    stop = StopRequest()
    with handling_stop_signals(stop, go_on):
        try:
            _resolve(entry)(argument, stop)
        except UserError as error:
            say(f"error: {error}")
            return EXIT_USER_ERROR
    return _exit_code(stop.signal)


def _exit_code(stopped_by: Signals | None) -> int:
    return EXIT_OK if stopped_by is None else 128 + stopped_by


def _resolve(entry: Entry | str) -> Entry:
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


# -- several ranks: the code of each -------------------------------------------------------------------------


def _run_rank(
    environ: Mapping[str, str],
    entry: Entry | str,
    argument: str,
    shared_stop: SharedStop,
    launcher: int,
    meeting: socket.socket,
) -> None:
    os.environ.update(environ)
    rank = int(environ["RANK"])
    if rank == 0:
        os.environ[LISTENING] = str(meeting.detach())
    meeting.close()
    stop = StopRequest(shared_stop)
    listen_as_rank(stop, launcher)
    forgive_output(says_so=rank == 0)
    try:
        _resolve(entry)(argument, stop)
    except Exception as error:  # whatever it is, the launcher has to hear of it before this process ends
        failure = RankFailure.of(error, rank)
        failure.write(Path(environ[REPORTS]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER_ERROR if failure.is_user_error else EXIT_FAILURE)


# -- several ranks: the launcher -----------------------------------------------------------------------------


def _attempt(
    argument: str, num_ranks: int, entry: Entry | str, supervisor: Supervisor
) -> int | AttemptFailure:
    context: Any = multiprocessing.get_context(START_METHOD)
    with (
        _open_meeting() as meeting,
        tempfile.TemporaryDirectory(prefix="tlt-launch-", ignore_cleanup_errors=True) as folder,
    ):
        environ = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(meeting.getsockname()[1]),
            # other users of the machine can reach its loopback (docs/security.md)
            SECRET: uuid.uuid4().hex,
            REPORTS: folder,
        }
        ranks = [
            context.Process(
                target=_run_rank,
                args=(
                    {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    entry,
                    argument,
                    supervisor.stop,
                    os.getpid(),
                    meeting,
                ),
            )
            for rank in range(num_ranks)
        ]
        first = supervisor.run(ranks)
        if not first or supervisor.has_killed:
            return _exit_code(supervisor.stop.heard)
        reports = [RankFailure.read(path) for path in Path(folder).glob("rank*.json")]
        return find_cause(reports, first, lambda rank: how_it_ended(ranks[rank].exitcode))


def _open_meeting() -> socket.socket:
    """Stays open, so that no other process takes the port. Raises UserError without a loopback."""
    meeting = socket.socket()
    try:
        meeting.bind((_LOOPBACK, 0))
        meeting.listen()
        with socket.create_connection(meeting.getsockname(), timeout=10.0):
            meeting.accept()[0].close()
    except OSError as error:
        meeting.close()
        what = f"the ranks of this machine cannot meet at {_LOOPBACK} ({error.strerror})"
        remedy = "bring its loopback up (ip link set lo up), or give --run.num_ranks 1"
        raise UserError(f"run.num_ranks: {what}; {remedy}") from None
    return meeting


@contextmanager
def _environment(threads_per_rank: int) -> Iterator[None]:
    added = {
        "OMP_NUM_THREADS": str(threads_per_rank),
        # gloo would read an earlier attempt's addresses from a shared store (torch issue 135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # otherwise a reverse look-up of localhost may take 5 s
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        # torch otherwise warns of a rank that has ended with frames of C++, before the launcher says why
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    previous = {name: os.environ[name] for name in added if name in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ.update(previous)
