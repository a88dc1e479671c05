"""A process that scores responses one after another: as its parent sees it, and what runs in it. Knows neither tasks nor pools.

    parent    Worker.score ─▶ pipe ─▶ Scorer.score       killed at the time-out; whoever holds it starts another
    worker    ready, or why not ◀─ work() ─▶ a reward for every response

Workers import this module, so it imports nothing heavy: no torch. They are plain programs rather than multiprocessing's
children, which would import the parent's main module again, torch and more, for each. One pipe per worker tells which response
a dead worker had.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tlt.rl.scoring import Response, RewardSpec, Scorer
from tlt.tasks.base import describe
from tlt.types import Reward

START_SECONDS = 120.0
"""Time limit for a worker to start and to import its task."""


class Worker:
    """One worker process, as its thread sees it. It leads a session of its own: no Ctrl-C of the terminal reaches it, and
    what its task has started is killed with it."""

    def __init__(self, spec: RewardSpec) -> None:
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-c", "from tlt.rl.reward_worker import work; work()", str(theirs.fileno()), spec.to_json()]
        paths = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},  # every worker walks through a set alike
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.is_ready = self.is_killed = False

    def score(self, response: Response, timeout_seconds: float) -> Reward:
        """Has the worker score a response. Afterwards it is either ready for the next one or killed."""
        try:
            if not self.is_ready:
                if not self.pipe.poll(START_SECONDS):
                    self.kill()
                    return Reward(0.0, False, f"the worker did not start within {START_SECONDS:g} s")
                if reason := self.pipe.recv():
                    self.kill()
                    return Reward(0.0, False, f"the worker could not start: {reason}")
                self.is_ready = True
            self.pipe.send(response)
            if not self.pipe.poll(timeout_seconds):
                self.kill()
                return Reward(0.0, False, f"time-out: not scored within {timeout_seconds:g} s")
            reward: Reward = self.pipe.recv()
            return reward
        except (EOFError, BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # its own exit code says more than our signal
            self.kill()
            return Reward(0.0, False, f"the worker died with exit code {self.process.returncode}")

    def kill(self) -> None:
        """Kills the process; once more does nothing. Another thread that waits on the pipe sees its end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread was faster
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.is_killed = True


# ── in the worker ────────────────────────────────────────────────────────────────────────────────────────────────────


def work() -> None:
    """Runs in the worker: says why it cannot begin, or "", and then scores until the pipe ends; the parent's death ends it."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    if sys.platform == "linux":  # should the parent be killed while a task hangs, the kernel ends this process too
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a rank has some blocked; what the task starts must hear them
    try:
        scorer = Scorer(RewardSpec.from_json(sys.argv[2]))
        scorer.warm_up()
    except (Exception, SystemExit) as error:
        pipe.send(describe(error))
        return
    pipe.send("")
    while True:
        try:
            response = pipe.recv()
        except EOFError:
            return
        pipe.send(scorer.score(response))
