"""Why an attempt of a run ended, and whether another one follows."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.types import UserError
from tlt.training.launch.signals import say

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2

REPORTS = "TLT_REPORTS"
"""Environment variable: the folder for the launched ranks' failure reports."""


class RankAwaited(RuntimeError): ...


@dataclass(frozen=True)
class RankFailure:
    """traceback: empty if the rank left because of another one.
    time: monotonic seconds; the earliest failure usually caused the others.
    is_awaiting: failed only because another rank did not come.
    """

    rank: int
    is_user_error: bool
    message: str
    traceback: str
    time: float
    is_awaiting: bool = False

    @property
    def line(self) -> str:
        return f"rank {self.rank} {'failed' if self.traceback else 'has left'}: {self.message}"

    @staticmethod
    def of(error: Exception, rank: int) -> RankFailure:
        is_mistake = isinstance(error, UserError)
        message = str(error) if is_mistake else traceback.format_exception_only(error)[-1].strip()
        is_awaiting = isinstance(error, RankAwaited)
        return RankFailure(rank, is_mistake, message, traceback.format_exc(), time.monotonic(), is_awaiting)

    @staticmethod
    def read(path: Path) -> RankFailure:
        return RankFailure(**json.loads(path.read_text()))

    def write(self, folder: Path) -> None:
        """Whole or not at all."""
        partial = folder / f".{self.rank}"
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(folder / f"rank{self.rank}.json")


def leave(message: str) -> NoReturn:
    """Ends this process, from any thread."""
    try:
        failure = RankFailure(int(os.environ["RANK"]), False, message, "", time.monotonic(), is_awaiting=True)
        failure.write(Path(os.environ[REPORTS]))
    except (KeyError, OSError):  # another launcher than ours, or ours is gone
        say(f"error: {message}; leaving")
    os._exit(EXIT_FAILURE)


@dataclass(frozen=True)
class AttemptFailure:
    causes: tuple[str, ...]
    traceback: str = ""
    is_user_error: bool = False
    is_awaiting: bool = False

    @property
    def place(self) -> str | None:
        frames = re.findall(r'^ +File "(.+)", line (\d+), in (.+)$', self.traceback, re.MULTILINE)
        return ":".join(frames[-1]) if frames else None


def find_cause(
    reports: Collection[RankFailure], first: Collection[int], how: Callable[[int], str]
) -> AttemptFailure:
    """A user's mistake, else the report of a rank that ended first; a killed rank has none.

    how: returns how a rank's process ended.
    """
    ordered = sorted(reports, key=lambda report: report.time)
    if mistake := next((report for report in ordered if report.is_user_error), None):
        return AttemptFailure((mistake.message,), is_user_error=True)
    silent = sorted(set(first) - {report.rank for report in reports})
    if silent:
        return AttemptFailure(tuple(f"rank {rank} ended without a word: {how(rank)}" for rank in silent))
    cause = next(report for report in ordered if report.rank in first)
    return AttemptFailure((cause.line,), cause.traceback, is_awaiting=cause.is_awaiting)


class Restarts:
    """A failure that would come again is final: a user's mistake, or an error at the same line of code
    without progress in between.

    progress: returns where another attempt would resume.
    log: file for tracebacks; None: stderr.
    """

    def __init__(
        self,
        limit: int = 0,
        progress: Callable[[], str] = lambda: "from the beginning",
        log: Path | None = None,
    ) -> None:
        self.limit, self.num_done = limit, 0
        self._progress, self._log = progress, log
        self._last: tuple[str, str] | None = None  # (line of code that failed, progress then)

    def follows(self, failure: AttemptFailure) -> bool:
        if failure.is_user_error or self.limit == 0:
            return _give_up(failure)
        progress = self._progress()
        now = None if failure.place is None else (failure.place, progress)
        if self.num_done == self.limit:
            return _give_up(failure, f"; not started again: run.max_restarts is {self.limit}")
        if now is not None and now == self._last:
            why = f"it failed there before, and nothing was saved since ({progress})"
            return _give_up(failure, f"; not started again: {why}")
        self._last = now
        self.num_done += 1
        counted = f"restart {self.num_done} of {self.limit}{self._write(failure)}"
        say(f"{'; '.join(failure.causes)}; starting again {progress} ({counted})")
        return True

    def _write(self, failure: AttemptFailure) -> str:
        if not failure.traceback:
            return ""
        if self._log is None or not self._log.parent.is_dir():
            sys.stderr.write(hide(visible(failure.traceback)))
            return ""
        text = hide(visible(f"{'; '.join(failure.causes)}\n{failure.traceback}"))
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return f", traceback in {self._log}"


def _give_up(failure: AttemptFailure, why: str = "") -> bool:
    sys.stderr.write(hide(visible(failure.traceback)))
    for cause in failure.causes:
        say(f"error: {cause}{why}")
    return False
