"""Dynamic sampling: replaces groups whose rewards are all equal (DAPO, arXiv 2503.14476, section 3.2,
equation 11).

    round 0   the step's problems ──────▶ groups ─▶ enough with different rewards?  ─ yes ─▶ update
                                            ▲              │ no
    round r   other problems of the epoch ──┘◀─────────────┘       after the last round others fill up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from tlt.base.types import Problem, Purpose, Request, Reward, Rollout, SamplingParams


@dataclass(frozen=True)
class GroupRequest:
    problem: Problem
    first_sample: int = 0

    def requests(self, num: int, params: SamplingParams, purpose: Purpose, step: int) -> list[Request]:
        problem_id, prompt_ids = self.problem.problem_id, self.problem.prompt_ids
        samples = range(self.first_sample, self.first_sample + num)
        return [Request(problem_id, sample, prompt_ids, params, purpose, step) for sample in samples]


@dataclass(frozen=True)
class Group:
    """By sample index."""

    request: GroupRequest
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    @property
    def problem_id(self) -> str:
        return self.request.problem.problem_id

    @property
    def has_signal(self) -> bool:
        """The rewards differ: the group has a gradient."""
        return len({reward.value for reward in self.rewards if reward.is_scored}) > 1


def flatten(groups: Sequence[Group]) -> tuple[list[Rollout], list[Reward]]:
    return [r for group in groups for r in group.rollouts], [r for group in groups for r in group.rewards]


MAX_RESAMPLES = 4
"""Rounds after the first; then groups without a signal fill the batch: where four rounds found too few, the
problems are too easy or too hard, and further ones cost whole rollouts."""


@dataclass(frozen=True)
class DynamicSampling:
    """num_groups: in the update.
    spare: problems to draw next, in this order.
    """

    num_groups: int
    num_samples: int
    spare: Sequence[Problem]
    max_resamples: int = MAX_RESAMPLES

    def next_requests(self, groups: Sequence[Group], num_rounds: int) -> list[GroupRequest]:
        """For each missing group a new problem, else the least drawn one without signal. Empty: the step is
        complete."""
        num_missing = self.num_groups - sum(group.has_signal for group in groups)
        if num_rounds > self.max_resamples:
            return []
        times = Counter(group.problem_id for group in groups)
        done = {group.problem_id for group in groups if group.has_signal}
        failed = {group.problem_id: group.request.problem for group in groups if group.problem_id not in done}
        fresh = (GroupRequest(problem) for problem in self.spare if problem.problem_id not in times)
        again = (
            GroupRequest(problem, times[problem_id] * self.num_samples)
            for problem_id, problem in sorted(failed.items(), key=lambda item: times[item[0]])
        )
        return list(islice(chain(fresh, again), num_missing))

    def select(self, groups: Sequence[Group]) -> list[Group]:
        """One group for each problem: those with a signal first, then in the order drawn."""
        chosen: dict[str, Group] = {}
        for group in sorted(groups, key=lambda group: not group.has_signal):
            chosen.setdefault(group.problem_id, group)
        return list(chosen.values())[: self.num_groups]
