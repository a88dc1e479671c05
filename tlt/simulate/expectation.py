"""The expectation for a number of replicas: step seconds of every variant, from steps that all of them take alike. Prints
nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt.simulate.assumptions import Assumptions
from tlt.simulate.rollout import Replicas, StepResult, Variant

OFF = Variant("off", speculates=False)
TLT = Variant("TLT", trains=True)
ADAPTIVE = Variant("adaptive", trains=True, ahead=2, compares=True)
VARIANTS = (
    OFF,
    Variant("TLT without hand-over", migrates=False),
    TLT,
    Variant("+ ahead 1", trains=True, ahead=1),
    Variant("+ ahead 2", trains=True, ahead=2),
    ADAPTIVE,
)
WARM_UP = 2
"""Steps before those that count: as many as are generated ahead, and as the choice of idle work learns from."""


@dataclass(frozen=True)
class Expected:
    """A variant's mean step. times_first: seconds of the row's first variant / its own.  trained_share, ahead_share: of idle
    seconds.  worth: by use of idle time, seconds by which steps become shorter for every second of a replica, costs taken off.
    """

    variant: str
    seconds: float
    times_first: float
    rollout_seconds: float
    idle_seconds: float
    trained_share: float
    ahead_share: float
    num_migrated: float
    worth: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """num_replicas: that share a step.  num_steps: that were simulated of each variant, beside those before them."""

    num_replicas: int
    num_responses: int
    num_steps: int
    variants: tuple[Expected, ...]

    @property
    def tlt(self) -> Expected:
        """TLT as it is by default."""
        return self.of(TLT)

    def of(self, variant: Variant) -> Expected:
        return next(one for one in self.variants if one.variant == variant.name)


def num_steps_for(num_replicas: int) -> int:
    """Returns the steps to simulate: few replicas have few responses a step, so their steps differ more."""
    return min(max(64 // num_replicas, 1), 8)


def simulate(assumed: Assumptions, variant: Variant, num_replicas: int, num_problems: int, steps: range) -> list[StepResult]:
    """Returns these steps of a variant. Those before them are simulated where something of them is left."""
    replicas = Replicas(assumed, variant, num_replicas, num_problems)
    num_before = WARM_UP if variant.compares else max(variant.ahead, int(variant.trains))
    for step in range(max(steps.start - num_before, 0), steps.start):
        replicas.take_step(step)
    return [replicas.take_step(step) for step in steps]


def expect(assumed: Assumptions, num_replicas: int, num_problems: int, num_steps: int | None = None) -> Row:
    """Returns the row of the table for so many replicas, which share `num_problems` a step."""
    num_steps = num_steps or num_steps_for(num_replicas)
    steps = range(WARM_UP, WARM_UP + num_steps)
    variants = VARIANTS if assumed.knows_off else VARIANTS[1:]
    taken = {one: simulate(assumed, one, num_replicas, num_problems, steps) for one in variants}
    first = sum(step.seconds for step in taken[variants[0]])
    found = tuple(_summarize(one.name, results, first) for one, results in taken.items())
    return Row(num_replicas, num_problems * assumed.num_samples, num_steps, found)


def _summarize(name: str, steps: Sequence[StepResult], first: float) -> Expected:
    seconds, idle = sum(step.seconds for step in steps), sum(step.idle_seconds for step in steps)
    return Expected(
        variant=name,
        seconds=seconds / len(steps),
        times_first=first / seconds,
        rollout_seconds=statistics.mean(step.rollout_seconds for step in steps),
        idle_seconds=idle / len(steps),
        trained_share=sum(step.trained_seconds for step in steps) / idle if idle else 0.0,
        ahead_share=min(sum(step.ahead_seconds for step in steps) / idle, 1.0) if idle else 0.0,
        num_migrated=statistics.mean(step.num_migrated for step in steps),
        worth={use.value: worth.net for use, worth in steps[-1].worth.items()},
    )
