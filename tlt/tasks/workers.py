"""Processes that run the user's code one call after another.

    parent    Worker.answer ─▶ pipe: Asked ─▶ the worker's function
    worker    ready, or an error ◀─ serve() ─▶ pipe: Answered, for every call

A worker that dies, is late, or sends no answer to its call is lost, and killed. Its own pipe tells which call
was lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from tlt.base.io.plugins import describe
from tlt.base.io.processes import Helper, be_first_to_go, how_it_ended

START_SECONDS = 120.0
EXIT_SECONDS = 5.0
"""The exit code of a worker that closes its pipe goes into the error."""
NO_ANSWER = "the worker's pipe brought what is no answer to the request"


class Asked(NamedTuple):
    number: int
    call: Any


class Answered(NamedTuple):
    number: int
    """The call's; a late answer has an older one."""
    answer: Any


class WorkerLost(Exception):
    """had_call: it had, or may have, taken up the call."""

    def __init__(self, how: str, had_call: bool) -> None:
        super().__init__(how)
        self.had_call = had_call


class CannotStart(Exception):
    """The user's code cannot be imported, by the next worker either."""


class Worker:
    """function: "package.module:name", called with the pipe and `spec`.
    fits: whether an answer is to this call: the user's code could write to the pipe.
    done: what an answer means, for errors.
    """

    def __init__(self, function: str, spec: str, fits: Callable[[Any, Any], bool], done: str) -> None:
        # every worker iterates over a set in one order
        self._helper = Helper(function, spec, env={"PYTHONHASHSEED": "0"})
        self._fits, self._done = fits, done
        self._deadline = time.monotonic() + START_SECONDS
        self._number = 0  # of the latest call
        self.pipe = self._helper.pipe
        self.is_ready = self.is_killed = False

    def answer(self, call: Any, timeout_seconds: float) -> Any:
        """Raises WorkerLost and CannotStart."""
        if not self.is_ready and (reason := self._await_start()):
            self.kill()
            raise CannotStart(f"the worker could not start: {reason}")
        if self.pipe.poll():  # it is dead, or has sent a second answer
            self._read(had_call=False)
            raise self._lost(NO_ANSWER, had_call=False)
        self._number += 1
        try:
            self.pipe.send(Asked(self._number, call))
        except BlockingIOError:
            raise self._lost("the worker has stopped reading its pipe", had_call=False) from None
        except OSError:
            raise self._died(had_call=False) from None
        if not self.pipe.poll(timeout_seconds):
            raise self._lost(f"time-out: not {self._done} within {timeout_seconds:g} s", had_call=True)
        match self._read(had_call=True):
            case Answered(self._number, answer) if self._fits(answer, call):
                return answer
        raise self._lost(NO_ANSWER, had_call=True)

    def kill(self) -> None:
        """A thread that reads the pipe finds its end."""
        self._helper.kill()
        self.is_killed = True

    def _await_start(self) -> str:
        if not self.pipe.poll(max(self._deadline - time.monotonic(), 0.0)):
            raise self._lost(f"the worker did not start within {START_SECONDS:g} s", had_call=False)
        reason = self._read(had_call=False)
        if not isinstance(reason, str):
            raise self._lost(NO_ANSWER, had_call=False)
        self.is_ready = not reason
        return reason

    def _read(self, had_call: bool) -> Any:
        try:
            return self.pipe.recv()
        except ConnectionResetError:  # it died with the call unread
            raise self._died(had_call=False) from None
        except EOFError:
            raise self._died(had_call) from None
        except Exception:  # unpickling may raise anything
            raise self._lost(NO_ANSWER, had_call) from None

    def _died(self, had_call: bool) -> WorkerLost:
        code = self._helper.end(EXIT_SECONDS)
        how = "the worker closed its pipe" if code is None else f"the worker died: {how_it_ended(code)}"
        return self._lost(how, had_call)

    def _lost(self, how: str, had_call: bool) -> WorkerLost:
        self.kill()
        return WorkerLost(how, had_call)


class Closed(Exception):
    """The pool is closed."""


class WorkerSlot:
    """Starts its worker ahead of the first call. The first death starts a spare: code that imports much takes
    longer to start than to answer."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self._worker = self._start_ahead()
        self._spare: Worker | None = None

    def answer(self, call: Any, timeout_seconds: float) -> Any:
        worker = self._worker = self._worker or self._start()
        try:
            return worker.answer(call, timeout_seconds)
        finally:
            if worker.is_killed:
                self._worker, self._spare = self._spare or self._start_ahead(), self._start_ahead()

    def _start_ahead(self) -> Worker | None:
        with contextlib.suppress(OSError, Closed):  # the next call then starts it, and has the error
            return self._start()
        return None


Job = TypeVar("Job")
Result = TypeVar("Result")


class Crew(Generic[Job, Result]):
    """One thread drives each worker. Used from one thread; only `get` waits.

    start: a new worker.
    answer: the result of a job; what it raises is a result, too.
    """

    def __init__(
        self, num_workers: int, start: Callable[[], Worker], answer: Callable[[Job, WorkerSlot], Result]
    ) -> None:
        self._start_worker, self._answer = start, answer
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Job, Result | Exception]] = SimpleQueue()
        self._lock = threading.Lock()  # of the next two: no worker starts after close
        self._workers: set[Worker] = set()
        self.is_closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        assert not self.is_closed, "the pool is closed"
        self._jobs.put(job)

    def put_result(self, job: Job, result: Result) -> None:
        self._done.put((job, result))

    @property
    def has_results(self) -> bool:
        return not self._done.empty()

    def get(self, timeout: float | None) -> tuple[Job, Result | Exception]:
        """timeout: in seconds; None: no limit. Raises Empty."""
        return self._done.get(timeout=timeout)

    def drop_jobs(self) -> None:
        """Those under way go on."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()

    def close(self) -> None:
        self.drop_jobs()
        with self._lock:
            self.is_closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        slot = WorkerSlot(self._start)
        while (job := self._jobs.get()) is not None:
            try:
                result: Result | Exception = self._answer(job, slot)
            except Closed:
                return
            except Exception as error:  # ours, or a job that cannot be pickled
                result = error
            self._done.put((job, result))

    def _start(self) -> Worker:
        with self._lock:
            if self.is_closed:
                raise Closed
            worker = self._start_worker()
            self._workers = {worker, *(other for other in self._workers if not other.is_killed)}
            return worker


# ── in the worker ───────────────────────────────────────────────────────────────────────────────────────────


def serve(
    pipe: Connection[Any, Any], begin: Callable[[], Callable[[Any], Any]], refuse: Callable[[Any, str], Any]
) -> None:
    """Answers until the pipe ends. A fork of the user's code that returns here ends, too: its pipe is closed.

    begin: imports the user's code; its result answers calls.
    refuse: the answer to a call that raised, and why.
    """
    be_first_to_go()
    with contextlib.suppress(EOFError, OSError):
        try:
            answer = begin()
        except BaseException as error:  # KeyboardInterrupt as well: no Ctrl-C comes here
            pipe.send(describe(error))
            return
        pipe.send("")
        while True:
            number, call = pipe.recv()
            try:
                answered = answer(call)
            except BaseException as error:  # as above
                answered = refuse(call, describe(error))
            pipe.send(Answered(number, answered))
