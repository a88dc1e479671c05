"""Hands a run's figures to its trackers, and never waits for one.

    run   log ─▶ queue, one per tracker ─▶ its thread ─▶ pipe ─▶ its process: begin · log · log · … · finish
                                               ▲                        │
                                               └── done, or why not ────┘

A tracker that cannot begin, hangs or dies is dropped; a failed `log` misses that step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from json import loads
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Final

from tlt.base.io.files import read_file, write_json
from tlt.base.io.plugins import describe
from tlt.base.io.processes import Helper, how_it_ended
from tlt.base.types import UserError
from tlt.training.report.trackers import Message, Point, TableOf, TrackedRun, TrackerReply


def run_id(folder: Path, known: str = "", say: Callable[[str], None] = lambda text: None) -> str:
    """Made once, kept in tracking.json. UserError if it differs from `known`: two runs are mixed.

    known: from checkpoint or journal.
    say: gets one line if tracking.json cannot be read, and is moved aside.
    """
    path = folder / "tracking.json"
    found = read_run_id(folder)
    if found is None:
        found = known or uuid.uuid4().hex[:8]
        if os.path.lexists(path):
            aside = _move_aside(path)
            whose = "the id that its checkpoint or journal knows" if known else "a new id"
            say(
                f"{path}: cannot be read, and is kept as {aside.name}; the run goes on under {found}, {whose}"
            )
        write_json(path, {"run_id": found})
    if known and found != known:
        raise UserError(
            f"{folder}: is run {found} by its tracking.json, but its checkpoint is of run {known}; "
            "bring back the one that belongs here, or remove tracking.json to go on as the checkpoint's"
        )
    return found


def read_run_id(folder: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = loads(read_file(folder / "tracking.json"))["run_id"]
        return found if isinstance(found, str) and found else None
    return None


def _move_aside(path: Path) -> Path:
    suffixes = ("", *(f"-{n}" for n in range(2, 1000)))
    names = (path.with_name(f"{path.name}.unreadable{suffix}") for suffix in suffixes)
    return path.rename(next(name for name in names if not os.path.lexists(name)))


# ── the run's side ──────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds until a tracker is given up.

    answer: to a message.
    finish: of all trackers, at the run's end.
    exit: of a process, once all is delivered.
    """

    answer: float = 120.0
    finish: float = 60.0
    exit: float = 5.0


class Tracking:
    """Used from one thread."""

    def __init__(self, feeds: Sequence[_Feed] = (), finish_seconds: float = 0.0) -> None:
        self._feeds, self._finish_seconds = feeds, finish_seconds

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for feed in self._feeds:
            feed.put(Point(step, values))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        for feed in self._feeds:
            feed.put(TableOf(step, name, columns, rows))

    def finish(self) -> None:
        """Until all is delivered or patience ends."""
        deadline = time.monotonic() + self._finish_seconds
        feeds, self._feeds = self._feeds, ()
        for feed in feeds:
            feed.put(None)
        for feed in feeds:
            feed.join(max(deadline - time.monotonic(), 0.0))
            if feed.is_alive():
                feed.give_up(f"not finished {self._finish_seconds:g} s after the run")
                feed.join(1.0)


NO_TRACKING: Final = Tracking()


def track(
    names: Sequence[str], run: TrackedRun, say: Callable[[str], None], patience: Patience = Patience()
) -> Tracking:
    feeds = [_Feed(name, run, say, patience) for name in names]
    for feed in feeds:
        feed.start()
    return Tracking(feeds, patience.finish)


class _Lost(Exception): ...


class _Feed(threading.Thread):
    def __init__(self, name: str, run: TrackedRun, say: Callable[[str], None], patience: Patience) -> None:
        super().__init__(name=f"tlt-tracker-{name}", daemon=True)
        self._tracker, self._run, self._say, self._patience = name, run, say, patience
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._helper: Helper | None = None
        self._given_up = ""
        self._num_missed = 0
        self._is_lost = False

    def put(self, message: Message) -> None:
        if not self._is_lost:
            self._messages.put(message)

    def give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason
        if self._helper is not None:
            self._helper.kill()

    def run(self) -> None:
        try:
            with _open_log(self._run.folder / "tracking.log") as log:
                self._helper = Helper("tlt.training.report.trackers:work", self._tracker, log=log)
            pipe = self._helper.pipe
            self._begin(pipe)
            while (message := self._messages.get()) is not None:
                self._deliver(pipe, message)
            if not (answer := self._ask(pipe, None)).is_done:
                raise _Lost(f"could not finish: {answer.text}")
        except Exception as error:  # any failure concerns this tracker alone
            self._is_lost = True
            why = self._given_up or (str(error) if isinstance(error, _Lost) else self._how_it_ended(error))
            self._say(
                f"tracking: {self._tracker}: {why}; the run goes on, and its metrics.jsonl has all figures"
            )
        if self._helper is not None:
            self._helper.pipe.close()  # the process sees its end
            self._helper.end(self._patience.exit)
        if self._num_missed:
            missed = f"{self._num_missed} steps are missing there; metrics.jsonl has them"
            self._say(f"tracking: {self._tracker}: {missed}")

    def _begin(self, pipe: Connection[Message, TrackerReply]) -> None:
        answer = self._ask(pipe, self._run)
        if not answer.is_done:
            raise _Lost(f"could not begin: {answer.text}")
        self._say(f"tracking: {self._tracker}: {answer.text}".removesuffix(": "))

    def _deliver(self, pipe: Connection[Message, TrackerReply], point: Message) -> None:
        if (answer := self._ask(pipe, point)).is_done:
            return
        if not self._num_missed:
            self._say(f"tracking: {self._tracker}: a step is missing there: {answer.text}; the run goes on")
        self._num_missed += 1

    def _ask(self, pipe: Connection[Message, TrackerReply], message: Message) -> TrackerReply:
        if self._given_up:
            raise _Lost
        pipe.send(message)
        if not pipe.poll(self._patience.answer):
            self.give_up(f"no answer within {self._patience.answer:g} s")
            raise _Lost
        return pipe.recv()

    def _how_it_ended(self, error: Exception) -> str:
        if self._helper is None:
            return f"could not be started: {describe(error)}"
        if not isinstance(error, OSError | EOFError):
            return describe(error)
        return f"its process ended: {how_it_ended(self._helper.end(self._patience.exit))}"


def _open_log(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError:  # a full disk is said elsewhere
        return Path(os.devnull).open("ab")
