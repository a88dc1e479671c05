"""What every strategy costs and brings at a constant batch, measured in turns within the same running batch.

    round:   arm 3 │ arm 7 │ off │ arm 1 │ …      a few steps each, in an order drawn anew every round;
                                                   the first step of a turn (it may catch up) is not counted

Whatever slows the machine for a while slows all arms alike. The steps themselves are kept, so that tuners can be compared
afterwards on exactly these costs (replay.py).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlt.engine.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.types import BatchState, Request, StepOutcome, Strategy, StrategyTuner


@dataclass(frozen=True)
class Step:
    """One engine step: its seconds, and how many sequences accepted 0, 1, 2, ... drafted tokens."""

    seconds: float
    histogram: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(count * (accepted + 1) for accepted, count in enumerate(self.histogram))


@dataclass
class ArmCosts:
    """Steps by arm at one batch size and temperature."""

    batch_size: int
    temperature: float
    steps: dict[Strategy, list[Step]] = field(default_factory=lambda: defaultdict(list))

    def speed(self, arm: Strategy) -> float:
        """Tokens per second over all steps."""
        steps = self.steps[arm]
        return sum(step.num_tokens for step in steps) / sum(step.seconds for step in steps)

    def accept_length(self, arm: Strategy) -> float:
        steps = self.steps[arm]
        return sum(step.num_tokens for step in steps) / sum(sum(step.histogram) for step in steps)

    @property
    def best(self) -> Strategy:
        return max(self.steps, key=self.speed)

    def to_json(self) -> dict[str, Any]:
        steps = {str(arm): [[round(s.seconds, 6), *s.histogram] for s in steps] for arm, steps in self.steps.items()}
        return {"batch_size": self.batch_size, "temperature": self.temperature, "steps": steps}

    @staticmethod
    def from_json(record: dict[str, Any]) -> ArmCosts:
        costs = ArmCosts(record["batch_size"], record["temperature"])
        for name, steps in record["steps"].items():
            costs.steps[Strategy.parse(name)] = [Step(row[0], tuple(row[1:])) for row in steps]
        return costs


class BestArms(StrategyTuner):
    """A tuner with hindsight: at every batch size it takes the arm that was best at the nearest recorded one."""

    def __init__(self, costs: Sequence[ArmCosts]) -> None:
        self.best = {c.batch_size: c.best for c in costs}

    def choose(self, batch: BatchState) -> Strategy:
        nearest = min(self.best, key=lambda size: abs(size - batch.num_running) / min(size, batch.num_running))
        return self.best[nearest]


class Turns(StrategyTuner):
    """A tuner that gives every arm its turn and writes down what happened."""

    def __init__(self, arms: Sequence[Strategy], batch_size: int, temperature: float, turn: int, seed: int = 0) -> None:
        self.arms, self.turn, self.random = list(arms), turn, random.Random(seed)
        self.costs = ArmCosts(batch_size, temperature)
        self.num_rounds = 0
        self._queue: list[Strategy] = []
        self._current = Strategy.OFF
        self._left = 0
        self._is_first = True

    def choose(self, batch: BatchState) -> Strategy:
        if batch.num_running != self.costs.batch_size:
            return Strategy.OFF  # filling up, or running out
        if self._left == 0:
            if not self._queue:
                self.num_rounds += 1
                self._queue = self.random.sample(self.arms, len(self.arms))
            self._current, self._left, self._is_first = self._queue.pop(), self.turn, True
        return self._current

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        if batch.num_running != self.costs.batch_size:
            return
        self._left -= 1
        if not self._is_first and self.num_rounds > 1:  # the first round warms up
            accepted = outcome.accepted or (0,) * batch.num_running
            histogram = [0] * (strategy.depth + 1)
            for count in accepted:
                histogram[min(count, strategy.depth)] += 1
            self.costs.steps[strategy].append(Step(outcome.seconds, tuple(histogram)))
        self._is_first = False


def record_arms(
    engine: RolloutEngine,
    requests: Callable[[int], Sequence[Request]],
    arms: Sequence[Strategy],
    batch_size: int,
    temperature: float,
    num_rounds: int,
    turn: int = 4,
) -> ArmCosts:
    """Runs `num_rounds` rounds of all arms at `batch_size`; `requests(i)` gives the i-th helping of work."""
    tuner = Turns(arms, batch_size, temperature, turn)
    engine.tuner, engine.scheduler.max_slots, engine.stats = tuner, batch_size, EngineStats()
    helpings: Iterator[Sequence[Request]] = (requests(i) for i in range(10**6))
    while tuner.num_rounds <= num_rounds + 1:
        while len(engine.scheduler.waiting) < batch_size:
            engine.add(next(helpings))
        engine.step()
    engine.abort()
    return tuner.costs
