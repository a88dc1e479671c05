"""Why an attempt of a run ended, and whether another one follows. Knows no processes, and not what they
compute."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tlt.io.secrets import hide
from tlt.io.text import visible
from tlt.launch.signals import say

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2

REPORTS = "TLT_REPORTS"
"""Variable that names the folder in which launched ranks write down why they fail."""


class RankAwaited(RuntimeError):
    """Ranks have waited for others that did not come, or that showed no sign of life."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed, as it wrote it down itself; of several, the first in `time` mostly caused the
    others.

    traceback: empty where the rank has left by itself.
    time: of a clock that only grows.
    is_awaiting: whether nothing was wrong here: another rank did not come.
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

    def write(self, folder: Path) -> None:
        """Writes it down for the launcher, whole."""
        partial = folder / f".{self.rank}"
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(folder / f"rank{self.rank}.json")


def leave(message: str) -> NoReturn:
    """Ends this rank, from whatever thread, on account of another one: says why to whoever collects that,
    or on stderr."""
    try:
        failure = RankFailure(int(os.environ["RANK"]), False, message, "", time.monotonic(), is_awaiting=True)
        failure.write(Path(os.environ[REPORTS]))
    except (KeyError, OSError):  # another launcher than ours, or ours is gone
        say(f"error: {message}; leaving")
    os._exit(EXIT_FAILURE)


@dataclass(frozen=True)
class AttemptFailure:
    """Why an attempt ended. causes: a line for each rank at fault, who and of what.
    traceback: empty where nobody left one.
    is_awaiting: whether it ended since a rank was awaited in vain."""

    causes: tuple[str, ...]
    traceback: str = ""
    is_user_error: bool = False
    is_awaiting: bool = False

    @property
    def place(self) -> str | None:
        """Returns the line of code that failed, the innermost of the traceback; None: whoever was killed
        could not say it."""
        frames = re.findall(r'^ +File "(.+)", line (\d+), in (.+)$', self.traceback, re.MULTILINE)
        return ":".join(frames[-1]) if frames else None


def find_cause(
    reports: Collection[RankFailure], first: Collection[int], how: Callable[[int], str]
) -> AttemptFailure:
    """Returns why an attempt failed: as a user's mistake if any rank found one, otherwise as the ranks that
    ended first put it. The others' failures follow from that: of a broken connection, or because they were
    ended. A rank that was killed could not put it at all.

    first: the ranks that ended first.
    how: says of a rank how its process ended.
    """
    mistakes = [report for report in reports if report.is_user_error]
    if mistakes:
        return AttemptFailure((min(mistakes, key=_time).message,), is_user_error=True)
    silent = sorted(set(first) - {report.rank for report in reports})
    if silent:
        return AttemptFailure(tuple(f"rank {rank} ended without a word: {how(rank)}" for rank in silent))
    cause = min((report for report in reports if report.rank in first), key=_time)
    return AttemptFailure((cause.line,), cause.traceback, is_awaiting=cause.is_awaiting)


class Restarts:
    """Decides whether the ranks are started again, and says so in one line.

    A user's mistake would come again, and so would an error at the line of code where the last attempt
    failed, unless something was saved in between.

    limit: of restarts in all.
    progress: says where another attempt would go on.
    log: file that tracebacks are appended to.
    """

    def __init__(
        self,
        limit: int = 0,
        progress: Callable[[], str] = lambda: "from the beginning",
        log: Path | None = None,
    ) -> None:
        self.limit, self.num_done = limit, 0
        self._progress, self._log = progress, log
        self._last: tuple[str, str] | None = (
            None  # (line of code, where the attempt that failed there would have gone on)
        )

    def follows(self, failure: AttemptFailure) -> bool:
        """Returns whether another attempt follows, and says where it goes on, or why none does."""
        if failure.is_user_error or self.limit == 0:
            _tell(failure)
            return False
        progress = self._progress()
        same = None if failure.place is None else (failure.place, progress)
        if self.num_done == self.limit:
            _tell(failure, f"not started again: run.max_restarts is {self.limit}")
            return False
        if same is not None and same == self._last:
            _tell(
                failure,
                f"not started again: it failed there before, and nothing was saved since ({progress})",
            )
            return False
        self._last = same
        self.num_done += 1
        written = self._write(failure)
        say(
            f"{'; '.join(failure.causes)}; starting again {progress} (restart {self.num_done} of "
            f"{self.limit}{written})"
        )
        return True

    def _write(self, failure: AttemptFailure) -> str:
        """Appends the traceback to the log; returns where it is."""
        if not failure.traceback:
            return ""
        text = hide(visible(f"{'; '.join(failure.causes)}\n{failure.traceback}"))
        if self._log is None or not self._log.parent.is_dir():
            sys.stderr.write(hide(visible(failure.traceback)))
            return ""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return f", traceback in {self._log}"


def _tell(failure: AttemptFailure, why: str | None = None) -> None:
    sys.stderr.write(hide(visible(failure.traceback)))
    for cause in failure.causes:
        say(f"error: {cause}" + (f"; {why}" if why else ""))


def _time(failure: RankFailure) -> float:
    return failure.time
