"""Tuners against recorded costs: the same steps offered to each, so that only their decisions differ.

A rollout is a list of response lengths. At every simulated step the tuner chooses an arm; a recorded step of that arm, at the
nearest batch sizes, says how long it took and how far each sequence came. Regret is the time lost against always running
the arm that is best on average at the batch of the moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arms import ArmCosts
from tlt.types import BatchState, StepOutcome, Strategy, StrategyTuner

PROMPT_TOKENS = 40


@dataclass(frozen=True)
class Replay:
    """Seconds since the start, tokens so far, cumulative regret in seconds and running sequences after every step."""

    times: tuple[float, ...]
    tokens: tuple[int, ...]
    regrets: tuple[float, ...]
    running: tuple[int, ...]

    def share_of_best(self, since: float = 0.0) -> float:
        """Speed over the best arms' speed, counting from the first step at which this share of the tokens is done."""
        start = next(i for i, tokens in enumerate(self.tokens) if tokens >= since * self.tokens[-1])
        first = (self.times[start - 1], self.regrets[start - 1]) if start else (0.0, 0.0)
        seconds, regret = self.times[-1] - first[0], self.regrets[-1] - first[1]
        return (seconds - regret) / seconds


class RecordedCosts:
    """Steps to draw from, and the speed of every arm, at any batch size between the recorded ones."""

    def __init__(self, costs: Sequence[ArmCosts]) -> None:
        self.costs = sorted(costs, key=lambda c: c.batch_size)
        self.arms = tuple(self.costs[0].steps)

    def _around(self, batch_size: int) -> tuple[ArmCosts, ArmCosts, float]:
        """The recorded sizes below and above, and how far between them (in logarithms) this one lies."""
        below = max((c for c in self.costs if c.batch_size <= batch_size), key=lambda c: c.batch_size, default=self.costs[0])
        above = min((c for c in self.costs if c.batch_size >= batch_size), key=lambda c: c.batch_size, default=self.costs[-1])
        if below is above:
            return below, above, 0.0
        return below, above, math.log(batch_size / below.batch_size) / math.log(above.batch_size / below.batch_size)

    def draw(self, arm: Strategy, batch_size: int, rng: random.Random) -> StepOutcome:
        below, above, share = self._around(batch_size)
        slow, fast = rng.choice(above.steps[arm]), rng.choice(below.steps[arm])
        seconds = math.exp((1 - share) * math.log(fast.seconds) + share * math.log(slow.seconds))
        near = above if share > 0.5 else below
        depths = range(arm.depth + 1)
        pooled = [sum(step.histogram[d] for step in near.steps[arm]) for d in depths]
        accepted = () if arm.is_off else tuple(rng.choices(depths, pooled, k=batch_size))
        return StepOutcome(batch_size + sum(accepted), accepted, (arm.budget,) * len(accepted), seconds)

    def speed(self, arm: Strategy, batch_size: int) -> float:
        below, above, share = self._around(batch_size)
        return math.exp((1 - share) * math.log(below.speed(arm)) + share * math.log(above.speed(arm)))

    def best_speed(self, batch_size: int) -> float:
        return max(self.speed(arm, batch_size) for arm in self.arms)


def replay(tuner: StrategyTuner, costs: RecordedCosts, lengths: Sequence[int], max_batch: int, seed: int) -> Replay:
    """One rollout of responses of these lengths, at most `max_batch` at a time."""
    rng = random.Random(seed)
    waiting, left = list(lengths), [0] * 0
    done = [0] * 0
    best = {n: costs.best_speed(n) for n in range(1, max_batch + 1)}
    speeds: dict[tuple[Strategy, int], float] = {}
    now, total, regret = 0.0, 0, 0.0
    times, tokens, regrets, running = [], [], [], []
    while waiting or left:
        while waiting and len(left) < max_batch:
            left.append(waiting.pop(0))
            done.append(0)
        size = len(left)
        batch = BatchState(size, PROMPT_TOKENS + sum(done) / size, 0, 0)
        arm = tuner.choose(batch)
        outcome = costs.draw(arm, size, rng)
        tuner.observe(arm, batch, outcome)
        steps = [1 + a for a in outcome.accepted] or [1] * size
        now += outcome.seconds
        speed = speeds.setdefault((arm, size), costs.speed(arm, size))
        regret += outcome.seconds * (1 - speed / best[size])  # by the arms' means: luck is no merit
        total += sum(min(s, n) for s, n in zip(steps, left, strict=True))
        rows = [(n - s, d + s) for n, s, d in zip(left, steps, done, strict=True) if n > s]
        left, done = [n for n, _ in rows], [d for _, d in rows]
        times.append(now)
        tokens.append(total)
        regrets.append(regret)
        running.append(size)
    return Replay(tuple(times), tuple(tokens), tuple(regrets), tuple(running))
