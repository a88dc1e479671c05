"""Starts the ranks of a run on this machine and ends them decently. Does not know what they compute.

    tlt train ── launch ─┬─ torchrun or Slurm set RANK, or one rank is enough: the entry runs right here
                         └─ torch's elastic agent ─┬─ rank 0: entry(config_json, stop)
                              ▲                    └─ rank 1: entry(config_json, stop)
                              └─ supervisor thread: hears SIGINT and SIGTERM, sets `stop` in every rank

Ctrl-C reaches the whole process group of a terminal. The agent by itself would pass it on and kill after 30 s, and a rank by
itself would die of KeyboardInterrupt in the middle of a step. Here the first signal only sets `stop`, which the entry polls;
the agent waits. The second Ctrl-C, or the end of the grace period, kills the ranks at once.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pkgutil
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Protocol

from tlt.types import UserError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 1.0
"""Two signals within this time count as one: torchrun sends its ranks the SIGINT that the terminal has sent them already."""


class SharedEvent(Protocol):
    """A flag that all processes of a launch see (a multiprocessing.Event)."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class StopRequest:
    """Whether this process was asked to stop. The entry polls `is_set()` (about 1 µs), finishes its step and returns."""

    def __init__(self, shared: SharedEvent | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._shared = shared

    def is_set(self) -> bool:
        return self.signal is not None or (self._shared is not None and self._shared.is_set())


Entry = Callable[[str, StopRequest], object]


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended, as it wrote it down itself; `time` orders failures, of which later ones are mostly consequences."""

    rank: int
    is_user_error: bool
    message: str
    traceback: str
    time: float


def launch(
    config_json: str,
    num_ranks: int,
    entry: Entry | str,
    threads_per_rank: int = 1,
    grace_seconds: float = 120.0,
    monitor_seconds: float = 0.1,
) -> int:
    """Runs `entry(config_json, stop)` on every rank and returns the exit code of the command.

    0: all ranks returned. 2: a rank raised UserError; its one line is on stderr. 1: a rank failed otherwise; its own traceback
    is on stderr, once. 130, 143: stopped by SIGINT, SIGTERM, all ranks having returned or the grace period being over.

    entry: an importable function, or "package.module:function".
    grace_seconds: how long the ranks may take to finish after the first signal.
    """
    if num_ranks < 1:
        raise UserError(f"ranks: {num_ranks} is too few; give 1 or more")
    if "RANK" in os.environ or num_ranks == 1:
        return _run_here(config_json, entry)
    return _run_agent(config_json, num_ranks, entry, threads_per_rank, grace_seconds, monitor_seconds)


# -- one rank, in this process ---------------------------------------------------------------------------------------------


def _run_here(config_json: str, entry: Entry | str) -> int:
    stop = StopRequest()
    with _handling_stop_signals(stop):
        try:
            _resolve(entry)(config_json, stop)
        except UserError as error:
            _say(f"error: {error}")
            return EXIT_USER_ERROR
    return EXIT_OK if stop.signal is None else 128 + stop.signal


@contextmanager
def _handling_stop_signals(stop: StopRequest) -> Iterator[None]:
    """First signal: `stop` is set. A second Ctrl-C, more than a second later: the process ends at once."""
    received_at = float("-inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if stop.signal is not None and number == signal.SIGINT and now - received_at > REPEAT_SECONDS:
            _say("stopped at once; the step under way is lost")
            os._exit(128 + number)
        if stop.signal is None:
            received_at = now
            stop.signal = signal.Signals(number)
            if os.environ.get("RANK", "0") == "0":
                _say("stopping after the work under way; Ctrl-C again ends at once")

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _resolve(entry: Entry | str) -> Entry:
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


# -- several ranks: what each of them runs ---------------------------------------------------------------------------------


def _run_rank(entry: Entry | str, config_json: str, report_dir: str, shared_stop: SharedEvent) -> None:
    """The body of one launched rank. A failure is written down for the parent, and the exit code says the rest."""
    stop = StopRequest(shared_stop)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and any(Path(report_dir).iterdir()):
            Path(report_dir, f"ended{os.environ['RANK']}").touch()
            os._exit(128 + number)  # the agent ends this rank because another has failed: nothing to wait for
        stop.signal = signal.Signals(number)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked by the parent until here, see _Supervisor
    is_finished = threading.Event()
    threading.Thread(target=_leave_when_orphaned, args=(os.getppid(), stop, is_finished), daemon=True).start()
    try:
        _resolve(entry)(config_json, stop)
        is_finished.set()
    except Exception as error:
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


def _leave_when_orphaned(parent: int, stop: StopRequest, is_finished: threading.Event) -> None:
    """When the parent was killed: stop as for a signal, then leave. torch's wrapper around a rank would wait forever for
    the parent to have read its return value."""
    while os.getppid() == parent:
        time.sleep(1.0)
    stop.signal = signal.SIGTERM
    is_finished.wait()
    os._exit(128 + signal.SIGTERM)


# -- several ranks: the parent ---------------------------------------------------------------------------------------------


def _run_agent(
    config_json: str, num_ranks: int, entry: Entry | str, threads_per_rank: int, grace_seconds: float, monitor_seconds: float
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
        with _quiet_agent(), _environment(threads_per_rank), _Supervisor(shared_stop, grace_seconds) as supervisor:
            try:
                elastic_launch(config, _run_rank)(entry, config_json, report_dir, shared_stop)
            except SignalException as quit:
                return 128 + int(quit.sigval)
            except ChildFailedError as failed:
                if supervisor.has_killed:
                    return supervisor.exit_code
                exit_codes = {rank: child.exitcode for rank, child in failed.failures.items()}
                return _report_failures(report_dir, num_ranks, exit_codes)
            return supervisor.exit_code
    finally:
        shutil.rmtree(report_dir, ignore_errors=True)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent would print its own account of what `_report_failures` says in one line."""
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
    """What the ranks inherit. The store of the rendezvous is not shared with them: across restarts gloo would read stale
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


class _Supervisor(threading.Thread):
    """Hears SIGINT and SIGTERM while the main thread is busy with the agent.

    The main thread blocks both signals, and so the ranks are born with them blocked: a Ctrl-C while they still import waits
    until they can handle it. They are delivered to this thread instead; Python writes their number to a socket (wakeup fd),
    which works however long the main thread stays inside C++.
    """

    def __init__(self, shared_stop: SharedEvent, grace_seconds: float) -> None:
        super().__init__(name="tlt-supervisor", daemon=True)
        self.first_signal: signal.Signals | None = None
        self.has_killed = False
        self._shared_stop = shared_stop
        self._grace_seconds = grace_seconds
        self._deadline = float("inf")
        self._read, self._write = socket.socketpair()

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.first_signal is None else 128 + self.first_signal

    def __enter__(self) -> _Supervisor:
        resource_tracker.ensure_running()  # started later by the first rank, it would unblock the signals (Python 3.11)
        self._read.settimeout(0.1)
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
            try:
                numbers = self._read.recv(64)
            except TimeoutError:
                numbers = None
            if numbers == b"":
                return
            for number in numbers or b"":
                if number in STOP_SIGNALS:
                    self._hear(signal.Signals(number))
            if time.monotonic() > self._deadline and not self.has_killed:
                self._kill(f"not finished after {self._grace_seconds:g} s: the ranks were killed; the step under way is lost")

    def _hear(self, number: signal.Signals) -> None:
        if self.first_signal is None:
            self.first_signal = number
            self._deadline = time.monotonic() + self._grace_seconds
            self._shared_stop.set()
            _say("stopping after the work under way; Ctrl-C again ends at once")
        elif number == signal.SIGINT and not self.has_killed:
            self._kill("stopped at once; the step under way is lost")

    def _kill(self, message: str) -> None:
        self.has_killed = True
        _say(message)
        for child in multiprocessing.active_children():
            child.kill()


def _report_failures(report_dir: str, num_ranks: int, exit_codes: dict[int, int]) -> int:
    """Prints why the run failed, as the rank that failed first put it, and returns the exit code. `exit_codes`: those that
    the agent saw first. A rank that was killed leaves no report; its peers then fail of the broken connection."""
    failures = [RankFailure(**json.loads(path.read_text())) for path in Path(report_dir).glob("rank*.json")]
    failures.sort(key=lambda failure: (not failure.is_user_error, failure.time))
    if failures and failures[0].is_user_error:
        _say(f"error: {failures[0].message}")
        return EXIT_USER_ERROR
    ended = {int(path.name.removeprefix("ended")) for path in Path(report_dir).glob("ended*")}
    silent = sorted(set(range(num_ranks)) - ended - {failure.rank for failure in failures})
    for rank in silent:
        code = exit_codes.get(rank)
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "killed by a signal"
        _say(f"error: rank {rank} ended without a word: {how} (out of memory?)")
    if failures and not silent:
        sys.stderr.write(failures[0].traceback)
        _say(f"error: rank {failures[0].rank} failed: {failures[0].message}")
    elif failures and not any(exit_codes.get(rank, 0) < 0 for rank in silent):
        _say(f"error: rank {failures[0].rank} failed: {failures[0].message}")
    return EXIT_FAILURE


def _say(text: str) -> None:
    sys.stderr.write(f"tlt: {text}\n")
    sys.stderr.flush()
