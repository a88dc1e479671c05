"""A process that scores responses one after another: as its parent sees it, and what runs in it. Knows
neither tasks nor pools.

    parent    Worker.score ─▶ pipe: Request ─▶ Scorer.score       killed once it is lost; whoever holds it starts another
    worker    ready, or why not ◀─ work() ─▶ pipe: Answer, for every request

A worker is lost when it dies, is late, or says what nobody has asked for. One pipe per worker tells which
response it had.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tlt.io.plugins import describe
from tlt.io.processes import Helper, be_first_to_go, how_it_ended
from tlt.rewards.scoring import Response, RewardSpec, Scorer
from tlt.types import Reward

START_SECONDS = 120.0
"""Time limit for a worker to start and to import its task."""
EXIT_SECONDS = 5.0
"""Time limit for a worker to end after it has closed its pipe: its own exit code says more than that it
was killed."""
NO_ANSWER = "the worker's pipe brought what is no answer to the request"


class Request(NamedTuple):
    number: int
    response: Response


class Answer(NamedTuple):
    """number: the request's. A late answer has an older one."""

    number: int
    reward: Reward


class WorkerLost(Exception):
    """A worker was lost, and has been killed; the text says how. had_response: it had taken up the
    response, or may have."""

    def __init__(self, how: str, had_response: bool) -> None:
        super().__init__(how)
        self.had_response = had_response


class Worker:
    """One worker process, as its thread sees it."""

    def __init__(self, spec: RewardSpec) -> None:
        self._helper = Helper(
            "tlt.rewards.worker:work",
            spec.to_json(),
            env={"PYTHONHASHSEED": "0"},  # every worker walks through a set alike
        )
        self._deadline = time.monotonic() + START_SECONDS
        self._number = 0  # of the latest request
        self.pipe = self._helper.pipe
        self.is_ready = self.is_killed = False

    def score(self, response: Response, timeout_seconds: float) -> Reward:
        """Has the worker score a response. Raises WorkerLost. A worker that cannot import its task is
        killed and says why: this is the response's reason, as the next worker could not either."""
        if not self.is_ready and (reason := self._await_start()):
            self.kill()
            return Reward(0.0, False, f"the worker could not start: {reason}")
        if self.pipe.poll():  # it is dead, or has spoken since its last answer
            self._read(had_response=False)
            raise self._lost(NO_ANSWER, had_response=False)
        self._number += 1
        try:
            self.pipe.send(Request(self._number, response))
        except BlockingIOError:
            raise self._lost("the worker has stopped reading its pipe", had_response=False) from None
        except OSError:
            raise self._died(had_response=False) from None
        if not self.pipe.poll(timeout_seconds):
            raise self._lost(f"time-out: not scored within {timeout_seconds:g} s", had_response=True)
        match self._read(had_response=True):
            case Answer(self._number, Reward() as reward):
                return reward
        raise self._lost(NO_ANSWER, had_response=True)

    def kill(self) -> None:
        """Kills the process; once more does nothing. Another thread that waits on the pipe sees its end."""
        self._helper.kill()
        self.is_killed = True

    def _await_start(self) -> str:
        """Returns why the worker cannot begin; empty: it can."""
        if not self.pipe.poll(max(self._deadline - time.monotonic(), 0.0)):
            raise self._lost(f"the worker did not start within {START_SECONDS:g} s", had_response=False)
        reason = self._read(had_response=False)
        if not isinstance(reason, str):
            raise self._lost(NO_ANSWER, had_response=False)
        self.is_ready = not reason
        return reason

    def _read(self, had_response: bool) -> Any:
        """Returns the message that has come. Raises WorkerLost where it is the pipe's end, or none."""
        try:
            return self.pipe.recv()
        except ConnectionResetError:  # it died with the request unread
            raise self._died(had_response=False) from None
        except EOFError:
            raise self._died(had_response) from None
        except Exception:  # bytes that are no message, or half of one, may raise anything
            raise self._lost(NO_ANSWER, had_response) from None

    def _died(self, had_response: bool) -> WorkerLost:
        code = self._helper.end(EXIT_SECONDS)
        how = "the worker closed its pipe" if code is None else f"the worker died: {how_it_ended(code)}"
        return self._lost(how, had_response)

    def _lost(self, how: str, had_response: bool) -> WorkerLost:
        self.kill()
        return WorkerLost(how, had_response)


# ── in the worker ───────────────────────────────────────────────────────────────────────────────────────────


def work(pipe: Connection[Answer | str, Request], spec: str) -> None:
    """Runs in the worker: says why it cannot begin, or "", and then scores until the pipe ends. It ends as
    well in a fork that the user's code lets return here: there it is closed."""
    be_first_to_go()
    with contextlib.suppress(EOFError, OSError):
        try:
            scorer = Scorer(RewardSpec.from_json(spec))
            scorer.warm_up()
        except (
            BaseException
        ) as error:  # a KeyboardInterrupt as well is the user's code's own: no Ctrl-C comes here
            pipe.send(describe(error))
            return
        pipe.send("")
        while True:
            number, response = pipe.recv()
            try:
                reward = scorer.score(response)
            except BaseException as error:  # as above
                reward = Reward(0.0, False, describe(error))
            pipe.send(Answer(number, reward))
