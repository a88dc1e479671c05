"""Rewards, computed in worker processes beside the generation. Knows tasks by name, and neither models nor engines.

    engine's process   submit ─▶ jobs ─▶ one thread per worker ─▶ done ─▶ drain
                                            │      ▲
    worker process                          └─▶ task.score(problem, text)       killed at the time-out, and replaced

A response that cannot be scored says why in `Reward.error`. The update leaves it out, `summarize` counts it for the step's
record, and `check_scorable` ends a run in which none can be scored.

Workers import this module, so it imports nothing heavy: no torch. They are plain programs rather than multiprocessing's
children, which would import the parent's main module again, torch and more, for each. One pipe per worker tells which response
a dead worker had.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tlt.tasks.base import Task, get_task
from tlt.types import Reward, UserError, one_line

START_SECONDS = 120.0
"""Time limit for a worker to start and to import its task."""

Key = tuple[str, int]
"""(problem id, sample index)"""


@dataclass(frozen=True)
class RewardSummary:
    """A step's rewards in numbers. The means are over the responses that were scored, NaN where none was. `num_errors`
    counts the others; `first_error` says why the first of them was not scored, and is empty where there is none."""

    mean: float
    solve_rate: float
    num_errors: int
    first_error: str


def summarize(rewards: Sequence[Reward]) -> RewardSummary:
    """Returns the means over the responses that were scored, and how many were not."""
    scored = [reward for reward in rewards if reward.is_scored]
    errors = [reward.error for reward in rewards if not reward.is_scored]
    mean = sum(reward.value for reward in scored) / len(scored) if scored else math.nan
    solve_rate = sum(reward.is_solved for reward in scored) / len(scored) if scored else math.nan
    return RewardSummary(mean, solve_rate, len(errors), errors[0] if errors else "")


def check_scorable(rewards: Sequence[Reward], task: str, step: int) -> None:
    """Raises UserError where not one response of a step could be scored: the task is at fault, and nothing can be learned."""
    summary = summarize(rewards)
    if rewards and summary.num_errors == len(rewards):
        raise UserError(
            f"task {task}: none of the {len(rewards)} responses of step {step} could be scored; the first says "
            f"{summary.first_error!r}; correct the task's score"
        )


class Job(NamedTuple):
    key: Key
    problem: dict[str, Any]
    text: str


class RewardPool:
    """Scores responses of one task in `num_workers` processes; with 0 inside `submit` and without time-out, to debug a task.

    task_spec: a registered task, or "package.module:object".
    timeout_seconds: of one response, from the moment a worker takes it up.
    Use it from one thread. `submit` never waits.
    """

    def __init__(self, task_spec: str, num_workers: int, timeout_seconds: float) -> None:
        self._task = get_task(task_spec)  # a misspelt task is the user's mistake now, not a thousand errors later
        self.task_spec, self.timeout_seconds = task_spec, timeout_seconds
        self._pending: dict[Key, Job] = {}
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Job, Reward | Exception]] = SimpleQueue()
        self._lock = threading.Lock()  # of the next two: no worker starts after close
        self._workers: dict[int, Worker] = {}
        self._is_closed = False
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Key, problem: Mapping[str, Any], text: str) -> None:
        """Queues a response."""
        assert not self._is_closed, "the pool is closed"
        assert key not in self._pending, f"{key} was submitted twice"
        job = self._pending[key] = Job(key, dict(problem), text)
        if self._threads:
            self._jobs.put(job)
        else:
            self._done.put((job, score(self._task, job.problem, text)))

    def drain(self, patience: float = math.inf) -> dict[Key, Reward]:
        """Waits for everything submitted and returns the rewards. One response takes its time-out at most, and the start of a
        worker; many take many times that, divided by the number of workers.

        patience: seconds after which it raises UserError, naming the task and the responses that are being scored.
        """
        deadline = time.monotonic() + patience
        rewards: dict[Key, Reward] = {}
        while self._pending:
            try:
                rewards.update(self._next(None if patience == math.inf else max(deadline - time.monotonic(), 0.0)))
            except Empty:
                raise self._too_slow(patience) from None
        return rewards

    def _too_slow(self, patience: float) -> Exception:
        first = ", ".join(f"{problem} sample {sample}" for problem, sample in islice(self._pending, 3))
        return UserError(
            f"task {self.task_spec}: {len(self._pending)} responses were not scored within {patience:g} s, and the other ranks "
            f"wait no longer; the first are {first}; raise rewards.num_workers or lower rewards.timeout_seconds"
        )

    def abandon(self) -> None:
        """Forgets all that was submitted. What a worker is scoring right now goes on, to its time-out at most."""
        self._pending.clear()
        while True:
            try:
                self._jobs.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Nothing is left running, and closing twice is harmless."""
        self.abandon()
        with self._lock:
            self._is_closed = True
            for worker in self._workers.values():
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, timeout: float | None) -> dict[Key, Reward]:
        """Waits for the next result; nothing where it was abandoned. Raises Empty after `timeout` seconds (None: never)."""
        job, result = self._done.get(timeout=timeout)
        if self._pending.get(job.key) is not job:
            return {}
        del self._pending[job.key]
        if isinstance(result, Exception):
            raise result
        return {job.key: result}

    def _serve(self, index: int) -> None:
        """Serves jobs in a thread with a worker of its own, started ahead of the first job, and again when it was killed."""
        worker = self._start_ahead(index)
        while (job := self._jobs.get()) is not None:
            try:
                worker = worker or self._start(index)
            except OSError as error:  # the system has no room for a process; the next response tries again
                self._done.put((job, Reward(0.0, False, f"no worker could be started: {error}")))
                continue
            if worker is None:
                return
            try:
                result: Reward | Exception = worker.score(job, self.timeout_seconds)
            except Exception as error:  # ours, or an unpicklable problem: raised where rewards are asked for
                result = error
            self._done.put((job, result))
            if worker.is_killed:
                worker = self._start_ahead(index)
        if worker is not None:
            worker.kill()

    def _start_ahead(self, index: int) -> Worker | None:
        with contextlib.suppress(OSError):  # then the next response asks for it, and says why not
            return self._start(index)
        return None

    def _start(self, index: int) -> Worker | None:
        """Starts a worker; None once the pool is closed."""
        with self._lock:
            if self._is_closed:
                return None
            self._workers[index] = Worker(self.task_spec)
            return self._workers[index]


class Worker:
    """One worker process, as its thread sees it. It leads a session of its own: no Ctrl-C of the terminal reaches it, and
    what its task has started is killed with it."""

    def __init__(self, task_spec: str) -> None:
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-c", "from tlt.rl.rewards import work; work()", str(theirs.fileno()), task_spec]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.is_ready = self.is_killed = False

    def score(self, job: Job, timeout_seconds: float) -> Reward:
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
            self.pipe.send((job.problem, job.text))
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
        task = get_task(sys.argv[2])
    except (Exception, SystemExit) as error:
        pipe.send(one_line(error))
        return
    pipe.send("")
    while True:
        try:
            problem, text = pipe.recv()
        except EOFError:
            return
        pipe.send(score(task, problem, text))


def score(task: Task, problem: dict[str, Any], text: str) -> Reward:
    """Scores one response. A task is the user's code: whatever it raises becomes the error of this one response."""
    try:
        result = task.score(problem, text)
        value, is_solved = float(result["reward"]), bool(result["solved"])
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}")
    except (Exception, SystemExit) as error:
        return Reward(0.0, False, one_line(error))
    return Reward(value, is_solved)
