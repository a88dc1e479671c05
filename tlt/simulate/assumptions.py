"""All that a simulated run rests on, in one place: lengths, costs, acceptance, agreement, idle work. Knows no replica.

recorded.py   from a run: what it measured itself        gpu.py   from a curve, for machines that nobody has measured here
         └──────────────────────▶ Assumptions ◀──────────────────────┘
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt.drafter.drafting.ahead import lead
from tlt.simulate.measured import Measured
from tlt.types import Lead, NoiseKey

GENERAL = (
    "the same response has the same length under the policies of two steps; what is known of lengths orders nothing",
    "where idle work slows nobody, nobody rests to find that out",
    "the store answers at once, rewards are there at once, drafters are averaged in no time",
    "the tuners' statistics stay, nothing is tried out; what training brings counts in the choice of idle work alone",
)
"""Assumptions of every simulation, for people."""

Groups = Sequence[Sequence[int]]
"""Lengths of responses in tokens, those to one problem together."""


class Lengths(Protocol):
    def of_step(self, step: int, num_problems: int, num_samples: int) -> Groups:
        """Returns the lengths of a step's responses: the same for the same step."""
        ...


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths of recorded steps. A step that has as many problems as were recorded is that very step; of larger or smaller ones
    each problem is one of those recorded, drawn anew for each step."""

    steps: Sequence[Groups]
    seed: int = 0

    def of_step(self, step: int, num_problems: int, num_samples: int) -> Groups:
        if step < len(self.steps) and len(self.steps[step]) == num_problems:
            return self.steps[step]
        draw = random.Random(f"{self.seed}/{step}")
        known = [group for groups in self.steps for group in groups]
        return [[draw.choice(group) for _ in range(num_samples)] for group in draw.choices(known, k=num_problems)]


@dataclass(frozen=True)
class LogNormalLengths:
    """Long-tailed lengths: half of them are above `median`, one in twenty would be above `p95`, none is above `cap`."""

    median: float
    p95: float
    cap: int
    seed: int = 0

    def of_step(self, step: int, num_problems: int, num_samples: int) -> Groups:
        draw, sigma = random.Random(f"{self.seed}/{step}"), math.log(self.p95 / self.median) / 1.6449
        drawn = [draw.lognormvariate(math.log(self.median), sigma) for _ in range(num_problems * num_samples)]
        lengths = [min(max(round(length), 1), self.cap) for length in drawn]
        return [lengths[i : i + num_samples] for i in range(0, len(lengths), num_samples)]


@dataclass(frozen=True)
class Followed:
    """How far references of one age lead. The mean number of tokens: to the first difference; of an agreement found again after
    it; between two of those."""

    first: float
    stretch: float
    gap: float


@dataclass(frozen=True)
class Agreement:
    """How responses agree with their references, by age in updates; older ones are as the oldest of these."""

    by_age: Mapping[int, Followed]
    confidence_threshold: float

    def of(self, age: int) -> Followed:
        return self.by_age[min(max(age, min(self.by_age)), max(self.by_age))]

    def lead(self, age: int, has_differed: bool, num_left: int) -> Lead:
        """Returns how far a reference leads which agrees here."""
        followed = self.of(age)
        return lead(1 - 1 / (followed.stretch if has_differed else followed.first), self.confidence_threshold, num_left)

    def ends(self, key: NoiseKey, age: int, length: int) -> list[int]:
        """Returns the positions at which agreement ends, begins, ends, … up to `length`. They belong to the key: wherever the
        response goes on, they are the same."""
        followed, draw = self.of(age), random.Random(f"{key}/{age}")
        ends, means = [draw.expovariate(1 / followed.first)], (followed.gap, followed.stretch)
        while ends[-1] < length:
            ends.append(ends[-1] + 1 + draw.expovariate(1 / means[(len(ends) - 1) % 2]))
        return [int(end) for end in ends]


@dataclass(frozen=True)
class SpotSpeed:
    """The drafter's training in idle time. The rest is as the configuration has it.

    train, recompute: seconds per token of a micro-step that trains, or that recomputes features.
    change: by how much a step's training raises 1 + the drafter's acceptance, as a share of it, however many replicas train.
    """

    train: float
    recompute: float
    max_passes: float | None
    tokens_per_micro_step: int
    carry_longest: int
    change: float = 0.0


@dataclass(frozen=True)
class Assumptions:
    """What a simulation rests on.

    engines: replica r has the one of r modulo their number.
    read_seconds: to read a token of a prompt, or of a response that another replica has begun.
    other_seconds: of a step outside of the rollout, such as the update's: step s has the one of s modulo their number.
    interference: the share by which a busy replica's steps take longer when all others of its host do idle work.
    per_host: replicas of a host.  knows_off: whether steps without speculation were measured.
    lines: all of it for people, beside GENERAL.
    """

    lengths: Lengths
    engines: Sequence[Measured]
    agreement: Agreement
    spot: SpotSpeed
    num_samples: int
    max_batch_size: int
    max_tokens: int
    prompt_tokens: int
    read_seconds: float
    other_seconds: Sequence[float]
    references_mib: float
    knows_off: bool = True
    interference: float = 0.0
    per_host: int = 1
    lines: tuple[str, ...] = ()
    seed: int = 0
