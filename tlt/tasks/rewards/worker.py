"""A process that scores responses one after another: the parent's side, and the code that runs in it.

    parent    Worker.answer ─▶ pipe: ScoreRequest ─▶ Scorer.answer
    worker    ready, or an error ◀─ run_worker() ─▶ pipe: ScoreAnswer, for every request

A worker that dies, is late, or sends no answer to its request is lost, and killed. Each has its own pipe,
which tells the call of a lost worker.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tlt.base.io.plugins import describe
from tlt.base.io.processes import Helper, be_first_to_go, how_it_ended
from tlt.base.types import Reward
from tlt.tasks.rewards.scoring import Call, RewardSpec, Scorer

START_SECONDS = 120.0
EXIT_SECONDS = 5.0
"""The exit code of a worker that closes its pipe goes into the error."""
NO_ANSWER = "the worker's pipe brought what is no answer to the request"


class ScoreRequest(NamedTuple):
    number: int
    call: Call


class ScoreAnswer(NamedTuple):
    number: int
    """The request's; a late answer has an older one."""
    rewards: list[Reward]


class WorkerLost(Exception):
    """The text says how.

    had_call: it had, or may have, taken up the call.
    """

    def __init__(self, how: str, had_call: bool) -> None:
        super().__init__(how)
        self.had_call = had_call


class Worker:
    def __init__(self, spec: RewardSpec) -> None:
        self._helper = Helper(
            "tlt.tasks.rewards.worker:run_worker",
            json.dumps(asdict(spec)),
            env={"PYTHONHASHSEED": "0"},  # every worker iterates over a set in one order
        )
        self._deadline = time.monotonic() + START_SECONDS
        self._number = 0  # of the latest request
        self.pipe = self._helper.pipe
        self.is_ready = self.is_killed = False

    def answer(self, call: Call, timeout_seconds: float) -> list[Reward]:
        """Raises WorkerLost. A worker that cannot import its task answers with that error: the next could
        not, either."""
        if not self.is_ready and (reason := self._await_start()):
            self.kill()
            return call.refused(f"the worker could not start: {reason}")
        if self.pipe.poll():  # it is dead, or has sent a second answer
            self._read(had_call=False)
            raise self._lost(NO_ANSWER, had_call=False)
        self._number += 1
        try:
            self.pipe.send(ScoreRequest(self._number, call))
        except BlockingIOError:
            raise self._lost("the worker has stopped reading its pipe", had_call=False) from None
        except OSError:
            raise self._died(had_call=False) from None
        if not self.pipe.poll(timeout_seconds):
            raise self._lost(f"time-out: not scored within {timeout_seconds:g} s", had_call=True)
        match self._read(had_call=True):
            case ScoreAnswer(self._number, [*rewards]) if _fits(rewards, call):
                return rewards
        raise self._lost(NO_ANSWER, had_call=True)

    def kill(self) -> None:
        """Another thread that reads the pipe finds its end."""
        self._helper.kill()
        self.is_killed = True

    def _await_start(self) -> str:
        """Returns why the worker cannot begin; "": it can."""
        if not self.pipe.poll(max(self._deadline - time.monotonic(), 0.0)):
            raise self._lost(f"the worker did not start within {START_SECONDS:g} s", had_call=False)
        reason = self._read(had_call=False)
        if not isinstance(reason, str):
            raise self._lost(NO_ANSWER, had_call=False)
        self.is_ready = not reason
        return reason

    def _read(self, had_call: bool) -> Any:
        try:
            return self.pipe.recv()
        except ConnectionResetError:  # it died with the request unread
            raise self._died(had_call=False) from None
        except EOFError:
            raise self._died(had_call) from None
        except Exception:  # unpickling may raise anything
            raise self._lost(NO_ANSWER, had_call) from None

    def _died(self, had_call: bool) -> WorkerLost:
        code = self._helper.end(EXIT_SECONDS)
        how = "the worker closed its pipe" if code is None else f"the worker died: {how_it_ended(code)}"
        return self._lost(how, had_call)

    def _lost(self, how: str, had_call: bool) -> WorkerLost:
        self.kill()
        return WorkerLost(how, had_call)


def _fits(rewards: list[Any], call: Call) -> bool:
    """Checks an answer: the user's code could write to the pipe."""
    return len(rewards) == len(call.responses) and all(isinstance(one, Reward) for one in rewards)


# ── in the worker ───────────────────────────────────────────────────────────────────────────────────────────


def run_worker(pipe: Connection[ScoreAnswer | str, ScoreRequest], spec: str) -> None:
    """Sends why the worker cannot begin, or "", then scores until the pipe ends.

    In a fork of the user's code that returns here the pipe is closed, so that it ends, too.
    """
    be_first_to_go()
    with contextlib.suppress(EOFError, OSError):
        try:
            scorer = Scorer(RewardSpec(**json.loads(spec)))
            scorer.warm_up()
        except BaseException as error:  # KeyboardInterrupt as well: no Ctrl-C comes here
            pipe.send(describe(error))
            return
        pipe.send("")
        while True:
            number, call = pipe.recv()
            try:
                rewards = scorer.answer(call)
            except BaseException as error:  # as above
                rewards = call.refused(describe(error))
            pipe.send(ScoreAnswer(number, rewards))
