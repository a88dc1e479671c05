"""Starts the ranks of a run on this machine, restarts them if one has died, and reports why they ended.

    tlt train ── launch ─┬─ this process is a rank (place.py), or there is one rank: runs the entry here
                         └─ torch's elastic agent ─┬─ rank 0: entry(argument, stop)
                              ▲                    └─ rank 1: entry(argument, stop)
                              └─ Supervisor (signals.py): hears SIGINT and SIGTERM, sets `stop` in every rank

Every attempt has its own agent and store. After a signal no attempt follows.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals

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


def launch(
    argument: str,
    num_ranks: int,
    entry: Entry | str,
    threads_per_rank: int = 1,
    grace_seconds: float = GRACE_SECONDS,
    monitor_seconds: float = 0.1,
    restarts: Restarts | None = None,
    go_on: str = "",
) -> int:
    """Runs `entry(argument, stop)` on every rank and returns the exit code of the command.

    0: all ranks returned.
    1: a rank failed; stderr has its traceback, or one line that names the killed rank.
    2: a rank raised UserError; its one line is on stderr.
    130, 143: SIGINT, SIGTERM has stopped the run.

    entry: an importable function, or "package.module:function".
    grace_seconds: from the first signal until the ranks are killed.
    go_on: the command that continues the run, for the message after a second Ctrl-C.
    """
    if num_ranks < 1:
        raise UserError(f"ranks: {num_ranks} is too few; give 1 or more")
    if is_rank(num_ranks):
        return run_here(argument, entry, go_on)
    assert threading.current_thread() is threading.main_thread(), "signals are heard in the main thread only"
    restarts = restarts or Restarts()
    supervising = Supervisor(num_ranks, grace_seconds, go_on)
    with _quiet_agent(), _environment(threads_per_rank), supervising as supervisor:
        while True:
            ending = _attempt(argument, entry, supervisor, monitor_seconds)
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
            supervisor.forget_ranks()


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
    entry: Entry | str,
    argument: str,
    report_dir: str,
    shared_stop: SharedStop,
    launcher: int,
    meeting: socket.socket,
) -> None:
    """meeting: the open port of the ranks' store, which rank 0 serves."""
    if os.environ["RANK"] == "0":
        os.environ[LISTENING] = str(meeting.detach())
    meeting.close()
    stop = StopRequest(shared_stop)
    is_finished = listen_as_rank(stop, launcher)
    os.environ[REPORTS] = report_dir
    forgive_output(says_so=os.environ["RANK"] == "0")
    try:
        _resolve(entry)(argument, stop)
        is_finished.set()
    except Exception as error:  # whatever it is, the launcher has to hear of it before this process ends
        failure = RankFailure.of(error, int(os.environ["RANK"]))
        failure.write(Path(report_dir))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER_ERROR if failure.is_user_error else EXIT_FAILURE)


# -- several ranks: the launcher -----------------------------------------------------------------------------


def _attempt(
    argument: str, entry: Entry | str, supervisor: Supervisor, monitor_seconds: float
) -> int | AttemptFailure:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tlt.training.launch import local_rendezvous

    meeting = _open_meeting()
    report_dir = tempfile.mkdtemp(prefix="tlt-launch-")
    os.environ[SECRET] = uuid.uuid4().hex
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=supervisor.num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=local_rendezvous.register_rendezvous(),
        rdzv_endpoint=f"{_LOOPBACK}:{meeting.getsockname()[1]}",
        local_addr=_LOOPBACK,
        max_restarts=0,  # the agent's own restarts know no user's mistakes, and would share a store
        monitor_interval=monitor_seconds,
        start_method="spawn",
        signals_to_handle="SIGQUIT",  # Ctrl-\; SIGINT and SIGTERM are the supervisor's
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        given = argument, report_dir, supervisor.stop, os.getpid(), meeting
        elastic_launch(config, _run_rank)(entry, *given)
        return _exit_code(supervisor.stop.heard)
    except SignalException as quit:
        return 128 + int(quit.sigval)
    except ChildFailedError as failed:
        if supervisor.has_killed:
            return _exit_code(supervisor.stop.heard)
        exit_codes = {rank: process.exitcode for rank, process in enumerate(supervisor.processes)}
        exit_codes |= {rank: child.exitcode for rank, child in failed.failures.items()}
        ended = ([rank for rank in group if exit_codes.get(rank) != EXIT_OK] for group in supervisor.deaths)
        first = next(filter(None, ended), list(exit_codes))
        reports = [RankFailure.read(path) for path in Path(report_dir).glob("rank*.json")]
        return find_cause(reports, first, lambda rank: how_it_ended(exit_codes.get(rank)))
    finally:
        meeting.close()
        shutil.rmtree(report_dir, ignore_errors=True)


def _open_meeting() -> socket.socket:
    """Open from now on, so that no other process takes the port. Raises UserError for a machine without a
    loopback."""
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
def _quiet_agent() -> Iterator[None]:
    names = "torch.distributed.elastic", "torch.multiprocessing.spawn"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _environment(threads_per_rank: int) -> Iterator[None]:
    """Other users of the machine can reach its loopback, but read nothing without the attempt's secret
    (docs/security.md)."""
    added = {
        "OMP_NUM_THREADS": str(threads_per_rank),
        # gloo would read an earlier attempt's addresses from a shared store (torch issue 135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # otherwise a reverse look-up of localhost may take 5 s
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
    }
    if sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    previous = {name: os.environ.get(name) for name in (*added, SECRET, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
