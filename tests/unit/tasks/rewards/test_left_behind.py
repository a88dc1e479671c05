"""Helper processes leave nothing behind: whatever they have started, in whatever session, however they or
their parent end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.tasks.rewards.parts import children, is_running, wait_for_files, wait_until
from tlt.base.types import Reward
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
from tlt.training.report.trackers import TrackedRun
from tlt.training.report.tracking import Patience, track

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
LITTER = """
import os, subprocess, sys, time

if "-c" in sys.orig_argv and os.environ.get("HANGS"):
    time.sleep(300)

def litter():
    sleep = ["sleep", os.environ["SLEEP"]]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run(["setsid", "--fork", *sleep], env={"PATH": os.environ["PATH"]})  # a daemon

class Task:
    def problems(self, num, seed, **options):
        return []
    def score(self, problem, text):
        litter()
        if text == "die":
            os._exit(3)
        while text == "hang":
            time.sleep(1)
        return {"reward": os.getpid(), "solved": True}

TASK = Task()

class Tracker:
    def begin(self, run): litter()
    def log(self, step, values): os._exit(3)
    def finish(self): pass
"""
PARENT = """
import sys, time
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
pool = RewardPool(RewardSpec("litter:TASK"), 1, 300)
pool.submit(("p", 0), {}, "hang")
time.sleep(300)
"""


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Returns a function that lists the processes which this test's tasks have left."""
    (tmp_path / "litter.py").write_text(LITTER)
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.syspath_prepend(tmp_path)
    seconds = f"300.{os.getpid()}{time.monotonic_ns()}"
    monkeypatch.setenv("SLEEP", seconds)

    def sleepers() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if seconds.encode() in path.read_bytes() else []
        return found

    yield sleepers
    kill(sleepers())
    sys.modules.pop("litter", None)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_worker_that_dies_or_is_late_leaves_nothing_that_it_has_started(
    sleepers: Callable[[], list[int]], how: str
) -> None:
    with RewardPool(RewardSpec("litter:TASK"), 1, timeout_seconds=1) as pool:
        pool.submit(("a", 0), {}, how)
        assert not pool.drain(patience=60)["a", 0].is_scored
        assert sleepers() == []


def test_after_close_nothing_is_left_that_a_worker_has_started(sleepers: Callable[[], list[int]]) -> None:
    with RewardPool(RewardSpec("litter:TASK"), 1, timeout_seconds=60) as pool:
        pool.submit(("a", 0), {}, "fine")
        worker = int(pool.drain(patience=60)["a", 0].value)
        wait_until(lambda: len(sleepers()) == 3)  # between fork and exec the last one has no name yet
    assert sleepers() == []
    assert not is_running(worker)


def test_of_a_worker_whose_keeper_is_killed_no_child_of_its_group_is_left_and_its_response_is_scored(
    sleepers: Callable[[], list[int]],
) -> None:
    before = children()
    with RewardPool(RewardSpec("litter:TASK"), 1, timeout_seconds=60) as pool:
        pool.submit(("a", 0), {}, "fine")
        worker = int(pool.drain(patience=60)["a", 0].value)
        wait_until(lambda: len(sleepers()) == 3)  # a daemon has its name a moment later
        (keeper,) = children() - before
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not is_running(worker))  # else it may begin with what comes next
        pool.submit(("b", 0), {}, "fine")
        second = pool.drain(patience=60)["b", 0]
        assert second == Reward(second.value, True)
        assert not is_running(worker)
    wait_until(lambda: len(sleepers()) == 2)  # those in sessions of their own


@pytest.mark.parametrize("dies", [False, True])
def test_a_tracker_leaves_nothing_that_it_has_started(
    sleepers: Callable[[], list[int]], tmp_path: Path, dies: bool
) -> None:
    tracking = track(
        ["litter:Tracker"], TrackedRun("a", "b", "c", tmp_path, {}, 0), lambda line: None, Patience()
    )
    if dies:
        tracking.log(1, {})
    tracking.finish()
    assert sleepers() == []


def test_a_parent_that_is_killed_leaves_nothing_that_its_workers_have_started(
    sleepers: Callable[[], list[int]], tmp_path: Path
) -> None:
    parent = start_parent(tmp_path)
    wait_until(lambda: len(sleepers()) == 3)
    parent.kill()
    parent.wait()
    wait_until(lambda: not sleepers())


SLOW_START = """
import os, sys, time
from pathlib import Path

here = Path(__file__).parent
if "-c" in sys.orig_argv:
    (here / f"begun.{os.getpid()}").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
"""


def test_a_parent_that_is_killed_while_its_worker_starts_leaves_none_that_hangs_in_an_import(
    sleepers: Callable[[], list[int]], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    parent = start_parent(tmp_path, HANGS="1")
    (begun,) = wait_for_files(tmp_path, "begun.*", 1)
    parent.kill()
    parent.wait()
    (tmp_path / "go").touch()
    worker = int(begun.suffix[1:])
    try:
        wait_until(lambda: not is_running(worker))
    finally:
        kill([worker])


def start_parent(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[4])])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.Popen(
        [sys.executable, str(folder / "parent.py")], env=environment, start_new_session=True
    )
