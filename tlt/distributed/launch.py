"""Starts the ranks of a run on this machine and says why they ended. Does not know what they compute.

    tlt train ── launch ─┬─ torchrun or Slurm set RANK, or one rank is enough: the entry runs right here
                         └─ torch's elastic agent ─┬─ rank 0: entry(argument, stop)
                              ▲                    └─ rank 1: entry(argument, stop)
                              └─ Supervisor (signals.py): hears SIGINT and SIGTERM, sets `stop` in every rank

The first signal only sets `stop`, which the entry polls; the agent waits. The second Ctrl-C, or the end of the grace period,
kills the ranks at once.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pkgutil
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals

from tlt.distributed.signals import SharedEvent, StopRequest, Supervisor, handling_stop_signals, listen_as_rank, say
from tlt.types import UserError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2

Entry = Callable[[str, StopRequest], object]


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed, as it wrote it down itself; of several, the first in `time` mostly caused the others."""

    rank: int
    is_user_error: bool
    message: str
    traceback: str
    time: float


def launch(
    argument: str,
    num_ranks: int,
    entry: Entry | str,
    threads_per_rank: int = 1,
    grace_seconds: float = 120.0,
    monitor_seconds: float = 0.1,
) -> int:
    """Runs `entry(argument, stop)` on every rank and returns the exit code of the command.

    0: all ranks returned. 2: a rank raised UserError; its one line is on stderr. 1: a rank failed otherwise; its own traceback
    is on stderr, once, or one line that names the rank that was killed. 130, 143: stopped by SIGINT, SIGTERM, all ranks having
    returned or the grace period being over.

    argument: any text that `entry` understands: a configuration as JSON, or JSON that holds one and what else the ranks need.
    entry: an importable function, or "package.module:function".
    grace_seconds: how long the ranks may take to finish after the first signal.
    """
    if num_ranks < 1:
        raise UserError(f"ranks: {num_ranks} is too few; give 1 or more")
    if is_rank(num_ranks):
        return _run_here(argument, entry)
    return _run_agent(argument, num_ranks, entry, threads_per_rank, grace_seconds, monitor_seconds)


def is_rank(num_ranks: int) -> bool:
    """Whether this process is a rank itself: the only one, or one that torchrun or Slurm has started."""
    return num_ranks == 1 or "RANK" in os.environ


# -- one rank, in this process ---------------------------------------------------------------------------------------------


def _run_here(argument: str, entry: Entry | str) -> int:
    stop = StopRequest()
    with handling_stop_signals(stop):
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


# -- several ranks: what each of them runs ---------------------------------------------------------------------------------


def _run_rank(entry: Entry | str, argument: str, report_dir: str, shared_stop: SharedEvent) -> None:
    """Runs one launched rank. It writes a failure down for the launcher; the exit code says the rest."""
    stop = StopRequest(shared_stop)
    is_finished = listen_as_rank(stop)
    try:
        _resolve(entry)(argument, stop)
        is_finished.set()
    except Exception as error:  # whatever it is, the launcher has to hear of it before this process ends
        rank = int(os.environ["RANK"])
        is_user_error = isinstance(error, UserError)
        message = str(error) if is_user_error else traceback.format_exception_only(error)[-1].strip()
        failure = RankFailure(rank, is_user_error, message, traceback.format_exc(), time.time())
        partial = Path(report_dir, f".{rank}")
        partial.write_text(json.dumps(asdict(failure)))
        partial.rename(Path(report_dir, f"rank{rank}.json"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER_ERROR if is_user_error else EXIT_FAILURE)


# -- several ranks: the launcher ---------------------------------------------------------------------------------------------


def _run_agent(
    argument: str, num_ranks: int, entry: Entry | str, threads_per_rank: int, grace_seconds: float, monitor_seconds: float
) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    assert threading.current_thread() is threading.main_thread(), "signals are heard in the main thread only"
    shared_stop = multiprocessing.get_context("spawn").Event()
    report_dir = tempfile.mkdtemp(prefix="tlt-launch-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=monitor_seconds,
        start_method="spawn",
        signals_to_handle="SIGQUIT",  # SIGINT and SIGTERM are the supervisor's; Ctrl-\ stays the agent's
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        with _quiet_agent(), _environment(threads_per_rank), Supervisor(shared_stop, num_ranks, grace_seconds) as supervisor:
            try:
                elastic_launch(config, _run_rank)(entry, argument, report_dir, shared_stop)
            except SignalException as quit:
                return 128 + int(quit.sigval)
            except ChildFailedError as failed:
                if supervisor.has_killed:
                    return _exit_code(supervisor.first_signal)
                exit_codes = {rank: process.exitcode for rank, process in enumerate(supervisor.processes)}
                exit_codes |= {rank: child.exitcode for rank, child in failed.failures.items()}
                return _report_failures(report_dir, supervisor.deaths, exit_codes)
            return _exit_code(supervisor.first_signal)
    finally:
        shutil.rmtree(report_dir, ignore_errors=True)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent's own account of what `_report_failures` says."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
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
    """Sets what the ranks inherit. The store of the rendezvous is not shared with them: across restarts gloo would read stale
    addresses from it (torch issue 135712). RES_OPTIONS: a reverse look-up of localhost may otherwise take 5 s."""
    added = {
        "OMP_NUM_THREADS": str(threads_per_rank),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
    }
    previous = {name: os.environ.get(name) for name in (*added, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _report_failures(report_dir: str, deaths: Sequence[Sequence[int]], exit_codes: Mapping[int, int | None]) -> int:
    """Prints why the run failed and returns the exit code: as a user's mistake if any rank found one, otherwise as the first
    rank to end put it. The others' failures follow from that: of a broken connection, or the agent ended them. A rank that was
    killed could not put it at all.

    deaths: groups of ranks in the order in which they ended, see `Supervisor`.
    """
    reports = [RankFailure(**json.loads(path.read_text())) for path in Path(report_dir).glob("rank*.json")]
    mistakes = [report for report in reports if report.is_user_error]
    if mistakes:
        say(f"error: {min(mistakes, key=_time).message}")
        return EXIT_USER_ERROR
    failed = ([rank for rank in group if exit_codes.get(rank) != EXIT_OK] for group in deaths)
    first = next(filter(None, failed), list(exit_codes))
    silent = set(first) - {report.rank for report in reports}
    for rank in sorted(silent):
        say(f"error: rank {rank} ended without a word: {_how_it_ended(exit_codes.get(rank))}")
    if not silent:
        cause = min((report for report in reports if report.rank in first), key=_time)
        sys.stderr.write(cause.traceback)
        say(f"error: rank {cause.rank} failed: {cause.message}")
    return EXIT_FAILURE


def _time(failure: RankFailure) -> float:
    return failure.time


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    name = Signals(-exit_code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
