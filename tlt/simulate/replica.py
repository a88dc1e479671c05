"""The parts of one simulated replica: a scorer that scores nothing, the drafter's training, and generating ahead with what all
replicas share. Knows no step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed import Store

from tlt.accounts import AheadReport, DrafterReport
from tlt.distributed.ahead_queue import AheadQueue
from tlt.drafter.training.spot import MicroStepSize
from tlt.engine.backend import RolloutBackend
from tlt.simulate.assumptions import SpotSpeed
from tlt.simulate.looks import LookingCoordinator
from tlt.training.rollout.ahead import AheadOfPolicy
from tlt.training.rollout.protocol import Ahead, DrafterSide, Found
from tlt.types import Finished, Key, NoiseKey, Reward

_INSTANT = 1e-6


class NoScorers:
    """Scores nothing, in no time."""

    def submit(self, key: Key, problem: Mapping[str, Any], text: str, token_ids: Sequence[int], step: int) -> None:
        """Takes a response in."""

    def collect(self) -> dict[Key, Reward]:
        return {}

    def drain(self, patience: float) -> dict[Key, Reward]:
        return {}

    def abandon(self) -> None:
        """Has nothing to forget."""


class Training(DrafterSide):
    """Trains the drafter in virtual time: micro-steps as long as the real trainer would make them, up to its limit of passes.

    carried: tokens of responses that stay from the step before; they have to be recomputed first.  step_seconds: of that step.
    """

    def __init__(self, speed: SpotSpeed, coordinator: LookingCoordinator, working: set[int]) -> None:
        self.speed, self.coordinator, self.working = speed, coordinator, working
        self.index, self.looks = coordinator.replica, coordinator.looks
        self.carried, self.step_seconds = 0, 1.0
        self.left = 0.0

    def begin(self) -> None:
        self.left = self.carried * self.speed.recompute + self._passes(self.carried)

    def observe(self, finished: Finished) -> None:
        self.left += self._passes(len(finished.rollout.token_ids))

    def train(self, should_stop: Callable[[], bool]) -> DrafterReport:
        num, start = 0, self.looks.time.now
        while not (is_preempted := should_stop()) and self.left > _INSTANT:
            seconds = min(self._micro_step_seconds(), self.left)
            self.working.add(self.index)
            limit = max(int(min(self.left, self.looks.longest) / seconds), 1)
            done = self.looks.steps(self.index, seconds, limit, self.coordinator.asks_in)
            self.left -= done * seconds
            num += done
        self.working.discard(self.index)
        now = self.looks.time.now
        return DrafterReport(num, seconds=now - start, preempted_at=now if num and is_preempted else None)

    def _passes(self, num_tokens: int) -> float:
        limit = self.speed.max_passes
        return math.inf if limit is None and num_tokens else (limit or 0.0) * num_tokens * self.speed.train

    def _micro_step_seconds(self) -> float:
        size = MicroStepSize(self.speed.tokens_per_micro_step)
        size.seconds_per_token = self.speed.train
        return self.speed.train * size.num_tokens(self.step_seconds)


class NotedAhead(Ahead):
    """Notes who generates ahead now. Where nothing was left once, nothing will be: it is not looked for again."""

    def __init__(self, ahead: Ahead, index: int, working: set[int]) -> None:
        self.ahead, self.index, self.working = ahead, index, working
        self.num_offered, self.is_done = ahead.num_offered, False

    def begin(self, queue: AheadQueue) -> None:
        self.ahead.begin(queue)

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        if self.is_done or should_stop():
            return AheadReport()
        self.working.add(self.index)
        report = self.ahead.run(should_stop)
        self.working.discard(self.index)
        self.is_done = not report.num_steps
        return report

    def take_found(self) -> dict[NoiseKey, Found]:
        return self.ahead.take_found()

    def keep(self, found: Iterable[Mapping[NoiseKey, Found]]) -> None:
        self.ahead.keep(found)

    def end(self) -> None:
        self.ahead.end()


class AheadLike(AheadOfPolicy):
    """Generates the same requests as another replica, in its order, which is sorted once for all."""

    def __init__(self, other: AheadOfPolicy, engine: RolloutBackend) -> None:
        self.__dict__.update(other.__dict__)
        self.engine, self.past = engine, []
        self.found, self._begun, self._done, self._own = {}, set(), [], deque()


class SharedAheadQueue(AheadQueue):
    """Reads what all have done from a set that they share, instead of as many keys of the store."""

    def __init__(self, store: Store, done: set[int]) -> None:
        super().__init__(store)
        self._all_done = done

    def note_done(self, numbers: Iterable[int]) -> None:
        self._all_done.update(numbers)

    def done(self) -> set[int]:
        return self._all_done
