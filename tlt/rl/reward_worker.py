"""A process that scores responses one after another: as its parent sees it, and what runs in it. Knows neither tasks nor pools.

    parent    Worker.score ─▶ pipe ─▶ Scorer.score       killed at the time-out; whoever holds it starts another
    worker    ready, or why not ◀─ work() ─▶ a reward for every response

One pipe per worker tells which response a dead worker had.
"""

from __future__ import annotations

import sys

from tlt.plugins import describe
from tlt.processes import Helper, be_first_to_go, begin, how_it_ended
from tlt.rl.scoring import Response, RewardSpec, Scorer
from tlt.types import Reward

START_SECONDS = 120.0
"""Time limit for a worker to start and to import its task."""


class Worker:
    """One worker process, as its thread sees it."""

    def __init__(self, spec: RewardSpec) -> None:
        self._helper = Helper(
            "tlt.rl.reward_worker:work",
            spec.to_json(),
            env={"PYTHONHASHSEED": "0"},  # every worker walks through a set alike
        )
        self.process, self.pipe = self._helper.process, self._helper.pipe
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
            code = self._helper.exit_code(1.0)  # its own says more than our signal
            self.kill()
            return Reward(0.0, False, f"the worker died: {how_it_ended(code)}")

    def kill(self) -> None:
        """Kills the process; once more does nothing. Another thread that waits on the pipe sees its end."""
        self._helper.kill()
        self.is_killed = True


# ── in the worker ────────────────────────────────────────────────────────────────────────────────────────────────────


def work() -> None:
    """Runs in the worker: says why it cannot begin, or "", and then scores until the pipe ends; the parent's death ends it."""
    pipe = begin()
    be_first_to_go()
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
