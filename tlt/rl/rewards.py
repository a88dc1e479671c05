"""Rewards, computed in worker processes beside the generation. Knows tasks by name, and neither models nor engines.

    engine's process   submit ──▶ ┐                          ┌ ──▶ poll · drain
    worker processes              └ task.score(problem, text)┘      a worker over its time-out is killed and replaced

A response that cannot be scored gets reward 0 with the reason in `Reward.error`, and is counted in `num_errors`.

Workers import this module, so it imports no torch at the top, and `tlt.types` (which does) only where the parent runs.
"""

from __future__ import annotations

import functools
import math
import signal
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from tlt.rl.tasks import Task, get_task

if TYPE_CHECKING:
    from tlt.types import Reward

Key = tuple[str, int]
"""(problem id, sample index)"""

Score = tuple[float, bool, str]
"""(reward, is solved, error): what a worker sends back."""


class RewardPool:
    """`num_workers` processes that score responses of one task; 0 scores inside `submit` (no time-out), to debug a task.

    task_spec: a registered task, or "package.module:object".
    timeout_seconds: of one response, from the moment a worker takes it up.
    """

    def __init__(self, task_spec: str, num_workers: int, timeout_seconds: float) -> None:
        _load_task(task_spec)  # a misspelt task is the user's mistake now, not a thousand errors later
        self.task_spec, self.timeout_seconds = task_spec, timeout_seconds
        self.num_errors = 0
        self._pool = (
            ProcessPool(num_workers, initializer=_load_task, initargs=(task_spec,), context=_WorkerContext())
            if num_workers
            else None
        )
        self._pending: dict[Key, Future[Score]] = {}
        self._done: deque[tuple[Key, Future[Score]]] = deque()  # appended to by the pool's thread
        self._rewards: dict[Key, Reward] = {}

    @property
    def num_pending(self) -> int:
        """Responses submitted and not yet returned by `poll` or kept for `drain`."""
        return len(self._pending)

    def submit(self, key: Key, problem: Mapping[str, Any], text: str) -> None:
        """Queues a response; returns at once."""
        assert key not in self._pending, f"{key} was submitted twice"
        args = (self.task_spec, dict(problem), text)
        future: Future[Score]
        if self._pool is None:
            future = Future()
            future.set_result(_score(*args))
        else:
            future = self._pool.schedule(_score, args=args, timeout=self.timeout_seconds)
        self._pending[key] = future
        future.add_done_callback(lambda done: self._done.append((key, done)))

    def poll(self) -> dict[Key, Reward]:
        """What has finished since the last poll or drain. Never waits."""
        self._collect()
        finished, self._rewards = self._rewards, {}
        return finished

    def drain(self) -> dict[Key, Reward]:
        """Waits for everything submitted; what no `poll` has returned yet."""
        wait(self._pending.values())
        self._collect()
        # `wait` may return before the last callbacks have run.
        for key, future in list(self._pending.items()):
            self._finish(key, future)
        return self.poll()

    def abandon(self) -> None:
        """Forgets all that was submitted; workers stop at their next response or at the time-out."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._rewards.clear()
        self._done.clear()

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Nothing is left running, and closing twice is harmless."""
        self.abandon()
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self) -> None:
        while self._done:
            key, future = self._done.popleft()
            if self._pending.get(key) is future:  # else: abandoned, or already taken by `drain`
                self._finish(key, future)

    def _finish(self, key: Key, future: Future[Score]) -> None:
        from tlt.types import Reward  # imports torch, which a worker must not

        del self._pending[key]
        value, is_solved, error = self._result(future)
        self.num_errors += bool(error)
        self._rewards[key] = Reward(value, is_solved, error)

    def _result(self, future: Future[Score]) -> Score:
        try:
            return future.result()
        except TimeoutError:
            return 0.0, False, f"time-out: not scored within {self.timeout_seconds:g} s"
        except ProcessExpired as death:
            return 0.0, False, f"the worker died with exit code {death.exitcode}"


# ── in the worker ────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _load_task(task_spec: str) -> Task:
    return get_task(task_spec)


def _score(task_spec: str, problem: dict[str, Any], text: str) -> Score:
    """A task is the user's code: whatever it raises becomes the error of this one response."""
    try:
        score = _load_task(task_spec).score(problem, text)
        value, is_solved = float(score["reward"]), bool(score["solved"])
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}")
    except (Exception, SystemExit) as error:
        return 0.0, False, f"{type(error).__name__}: {error}"
    return value, is_solved, ""


class _WorkerProcess(SpawnProcess):
    """A spawned process that leaves the parent's main module alone and never sees its Ctrl-C.

    Spawn would import the parent's `__main__` again: torch and more, seconds and hundreds of MB for each worker. And
    between exec and pebble's own handler a SIGINT to the process group would print a traceback; blocked, it is inherited
    as blocked.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        main = sys.modules["__main__"]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return Popen(process_obj)
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _WorkerContext(SpawnContext):
    Process = _WorkerProcess
