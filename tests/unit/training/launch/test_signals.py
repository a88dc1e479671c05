"""What a rank does when nobody looks after it any more, and what the user reads when a run is to stop."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from tlt.base.types import UserError
from tlt.training.launch.local import launch
from tlt.training.launch.signals import (
    REPEAT_SECONDS,
    SharedStop,
    StopRequest,
    handling_stop_signals,
    restore_terminal,
)

ORPHAN = """
import os
from tlt.training.launch.signals import StopRequest, _listen
_listen(StopRequest(), os.getppid() + 1, grace_seconds=0.05)
"""


def test_an_orphaned_rank_that_waits_for_one_that_has_died_leaves_when_its_grace_is_over() -> None:
    """Its main thread would wait for the other's part of a checkpoint, for an hour."""
    assert subprocess.run([sys.executable, "-c", ORPHAN], timeout=60, check=False).returncode == 143


def test_a_machine_without_a_loopback_is_refused_before_its_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would look for each other for five minutes."""

    def connect(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", connect)
    told = (
        r"^run\.num_ranks: .* cannot meet at 127\.0\.0\.1 \(Network is unreachable\); bring its loopback up"
    )
    with pytest.raises(UserError, match=told):
        launch("", 2, "no:entry")


def test_a_terminal_whose_live_lines_were_killed_has_its_cursor_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]  # a terminal
    monkeypatch.setattr(sys, "stdout", screen)
    restore_terminal()
    assert screen.getvalue() == "\r\x1b[2K\x1b[?25h"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_shared_memory_that_cannot_be_written_is_one_line(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("multiprocessing.heap.Heap.malloc", refuse)
    with pytest.raises(
        UserError, match=rf"cannot be written \({os.strerror(code)}\); make them writable, or"
    ):
        SharedStop()


def test_the_first_interrupt_here_is_no_second_one_after_another_machines_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, now = list[int](), [0.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = StopRequest()
    with handling_stop_signals(stop):
        stop.signal = signal.SIGINT  # another machine's
        for at, number_ended in ((100.0, 0), (100.0 + REPEAT_SECONDS / 2, 0), (101.0 + REPEAT_SECONDS, 1)):
            now[0] = at
            signal.raise_signal(signal.SIGINT)
            assert len(ended) == number_ended
