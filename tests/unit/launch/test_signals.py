"""What a rank does when nobody looks after it any more."""

from __future__ import annotations

import subprocess
import sys

ORPHAN = """
import os, threading
from tlt.launch.signals import StopRequest, _leave_when_orphaned
stop, is_finished = StopRequest(), threading.Event()
_leave_when_orphaned(os.getppid() + 1, stop, is_finished, grace_seconds=0.05)
"""


def test_an_orphaned_rank_that_waits_for_one_that_has_died_leaves_when_its_grace_is_over() -> None:
    """Its main thread would wait for the other's part of a checkpoint, for an hour."""
    assert subprocess.run([sys.executable, "-c", ORPHAN], timeout=60, check=False).returncode == 143
