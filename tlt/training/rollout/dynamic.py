"""Dynamic sampling: which groups of a step give a signal, and what is sampled in place of the others (DAPO, arXiv 2503.14476,
section 3.2, equation 11). Pure; knows neither engine nor clock.

    round 0   the step's problems ──────▶ groups ─▶ enough with different rewards?  ─ yes ─▶ update
                                            ▲              │ no
    round r   other problems of the epoch ──┘◀─────────────┘       after the last round others fill up

What is drawn follows from the seed, the step and the rewards so far. Every response of a step has a key of its own: another
problem, or the next sample indexes of one that had to be drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from tlt.types import Problem, Reward, Rollout


@dataclass(frozen=True)
class Draw:
    """Asks for a group: responses to a problem, from sample index `first_sample` on."""

    problem: Problem
    first_sample: int = 0


@dataclass(frozen=True)
class Group:
    """A draw with its responses, in the order of their sample indexes, and their rewards."""

    draw: Draw
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    @property
    def problem_id(self) -> str:
        return self.draw.problem.problem_id

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ, so that some response is better than another."""
        return len({reward.value for reward in self.rewards if reward.is_scored}) > 1


def flatten(groups: Sequence[Group]) -> tuple[list[Rollout], list[Reward]]:
    """Returns the responses of all groups, and their rewards."""
    return [r for group in groups for r in group.rollouts], [r for group in groups for r in group.rewards]


@dataclass(frozen=True)
class DynamicSampling:
    """The rule of one step.

    num_groups: groups that the update takes.  num_samples: responses of each.  max_resamples: most rounds after the first.
    spare: problems that the step does not begin with, in the order in which they step in.
    """

    num_groups: int
    num_samples: int
    max_resamples: int
    spare: Sequence[Problem]

    def next_draws(self, groups: Sequence[Group], num_rounds: int) -> list[Draw]:
        """Returns what the next round samples, given all groups of the `num_rounds` rounds so far: one draw for each group that
        lacks, of a new problem, or where none is left of those that were drawn least; none when the step is complete."""
        num_missing = self.num_groups - sum(group.has_signal for group in groups)
        if num_rounds > self.max_resamples:
            return []
        times = Counter(group.problem_id for group in groups)
        done = {group.problem_id for group in groups if group.has_signal}
        failed = {group.problem_id: group.draw.problem for group in groups if group.problem_id not in done}
        fresh = (Draw(problem) for problem in self.spare if problem.problem_id not in times)
        again = (
            Draw(problem, times[problem_id] * self.num_samples)
            for problem_id, problem in sorted(failed.items(), key=lambda item: times[item[0]])
        )
        return list(islice(chain(fresh, again), num_missing))

    def select(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups for the update, one for each problem: those with a signal, then in the order drawn others, until
        they are `num_groups`."""
        chosen: dict[str, Group] = {}
        for group in sorted(groups, key=lambda group: not group.has_signal):
            chosen.setdefault(group.problem_id, group)
        return list(chosen.values())[: self.num_groups]
