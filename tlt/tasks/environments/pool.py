"""Environments in worker processes, beside the generation.

    ask ─▶ jobs ─▶ one thread per worker ─▶ done ─▶ collect
                          │ ▲
                          ▼ │
                    worker process, killed at the time-out

The policy reads an error for a call that is late or ends its process; the environment then is as it was
before. The call is not tried again: it may have had effects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict
from multiprocessing.connection import Connection
from queue import Empty
from typing import Any, Generic, NamedTuple, TypeVar

from tlt.base.types import UserError
from tlt.tasks.environments.environment import Answer, Ask, Environments, EnvironmentSpec, say_error
from tlt.tasks.workers import CannotStart, Crew, Worker, WorkerLost, WorkerSlot, serve

MAX_LOST_BEFORE = 3
"""Workers lost in a row before they took up a call; then the machine is at fault."""

Key = TypeVar("Key", bound=Hashable)


class Reply(NamedTuple, Generic[Key]):
    key: Key
    answer: Answer
    seconds: float
    """From the question to the answer."""


class _Job(NamedTuple):
    key: Any
    ask: Ask
    start: float


class EnvironmentPool(Generic[Key]):
    """Used from one thread; nothing waits. timeout_seconds: for one question."""

    def __init__(self, spec: EnvironmentSpec, num_workers: int, timeout_seconds: float) -> None:
        self.spec, self.timeout_seconds = spec, timeout_seconds
        self._pending: dict[Key, _Job] = {}
        self._crew = Crew[_Job, Answer](num_workers, self._start, self._answer)

    def ask(self, key: Key, ask: Ask) -> None:
        assert key not in self._pending, f"{key} was not answered yet"
        job = self._pending[key] = _Job(key, ask, time.monotonic())
        self._crew.put(job)

    def put_answer(self, key: Key, answer: Answer) -> None:
        job = self._pending[key] = _Job(key, Ask("call", {}), time.monotonic())
        self._crew.put_result(job, answer)

    @property
    def has_news(self) -> bool:
        return self._crew.has_results

    def collect(self, timeout: float | None = 0.0) -> list[Reply[Key]]:
        """timeout: seconds to wait for the first; None: no limit. Raises UserError where no worker starts."""
        replies: list[Reply[Key]] = []
        while True:
            try:
                job, answer = self._crew.get(0.0 if replies else timeout)
            except Empty:
                return replies
            if self._pending.get(job.key) is not job:
                continue  # abandoned
            del self._pending[job.key]
            if isinstance(answer, Exception):
                raise answer
            replies.append(Reply(job.key, answer, time.monotonic() - job.start))

    def abandon(self) -> None:
        """Calls under way go on, to their time-out at most."""
        self._pending.clear()
        self._crew.drop_jobs()

    def close(self) -> None:
        self._crew.close()

    def _answer(self, job: _Job, slot: WorkerSlot) -> Answer:
        for number in range(1, MAX_LOST_BEFORE + 1):
            try:
                answer: Answer = slot.answer(job.ask, self.timeout_seconds)
            except (OSError, CannotStart) as error:
                raise UserError(f"environment: {error}; correct it") from None
            except WorkerLost as loss:
                if loss.had_call:
                    return self._lost(job.ask, str(loss))
                if number == MAX_LOST_BEFORE:
                    raise UserError(f"environment: {number} workers were lost, the last: {loss}") from None
            else:
                return answer
        raise AssertionError("the last loss has returned")

    def _lost(self, ask: Ask, how: str) -> Answer:
        if ask.kind != "call":
            return Environments.refuse(ask, how)
        is_late = how.startswith("time-out")
        what = f"{ask.name}: no result within {self.timeout_seconds:g} s" if is_late else f"{ask.name}: {how}"
        return Answer(say_error(what), ask.state, is_error=True, is_late=is_late)

    def _start(self) -> Worker:
        spec = json.dumps(asdict(self.spec))
        return Worker("tlt.tasks.environments.pool:run_worker", spec, _fits, "answered")


def _fits(answer: Any, call: Any) -> bool:
    return isinstance(answer, Answer)


def run_worker(pipe: Connection[Any, Any], spec: str) -> None:
    def begin() -> Callable[[Ask], Answer]:
        return Environments(EnvironmentSpec(**json.loads(spec))).answer

    serve(pipe, begin, Environments.refuse)
