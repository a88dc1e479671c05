"""Chooses what a step's idle time may generate ahead: the requests of the next steps."""

from __future__ import annotations

from tlt.rollout.ahead import AheadOfPolicy
from tlt.rollout.protocol import NO_AHEAD, Ahead
from tlt.training.problems import problems_of_step
from tlt.training.run import Run
from tlt.types import Request


def ahead_of(run: Run, generates: bool) -> Ahead:
    """Returns who generates the responses of the next steps in this one's idle time. generates: whether
    anything is."""
    rollout, seed, last = run.config.rollout, run.config.run.seed, run.config.run.num_steps - 1
    if not rollout.steps_ahead:
        return NO_AHEAD

    def requests_of(step: int) -> list[Request]:
        problems = problems_of_step(run.problems, step, rollout.problems_per_step, seed)
        numbers = range(rollout.samples_per_problem)
        return [
            Request(p.problem_id, i, p.prompt_ids, run.params, "rollout", step)
            for p in problems
            for i in numbers
        ]

    later = range(run.step + 1, min(run.step + rollout.steps_ahead, last) + 1)
    requests = [request for step in later for request in requests_of(step)] if generates else []
    past = requests_of(run.step)
    return AheadOfPolicy(run.engine, run.references, run.world.world_size, requests, past, run.lengths)
