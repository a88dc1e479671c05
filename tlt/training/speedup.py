"""The speedup of speculation within a run, measured every few steps on the leader, after the rollout."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from tlt.base.records import NAN, SpeedupPair
from tlt.base.spans import SpanName
from tlt.training.ranks.world import gather_objects
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.speedup_pair import MIN_TOKENS, affordable_tokens, measure_pair, pair_requests

if TYPE_CHECKING:
    from tlt.training.run import Run

NOT_MEASURED = SpeedupPair()


def is_pair_due(run: Run) -> bool:
    step, num_steps = run.step + 1, run.config.run.num_steps
    every = run.config.rollout.measure_speedup_every
    if not every or run.models.engine.tuner is None or not run.models.engine.generates_without_side_effects:
        return False
    return step % every == 0 or (step == num_steps < every)


def measure_speedup(run: Run, phase: PhaseResult) -> SpeedupPair:
    run.unmeasured_seconds += phase.seconds
    if not is_pair_due(run):
        return NOT_MEASURED
    own = NOT_MEASURED
    if run.world.is_leader:
        with run.timeline.span(SpanName.SPEEDUP):
            own = _measure(run, phase)
    with run.timeline.span(SpanName.WAIT):
        of_leader: SpeedupPair = gather_objects(run.world, own)[0]
    return of_leader


def _measure(run: Run, phase: PhaseResult) -> SpeedupPair:
    stats = phase.replicas[run.world.rank].stats
    num_tokens = affordable_tokens(stats, run.unmeasured_seconds, run.speedups[-1] if run.speedups else NAN)
    if num_tokens < MIN_TOKENS:
        return NOT_MEASURED
    problems = [group.request.problem for group in phase.groups]
    num = max(round(stats.sequence_seconds / stats.seconds), 1)
    requests = pair_requests(problems, run.data.params, run.step, num, num_tokens)
    drafts_first = len(run.speedups) % 2 == 0
    pair = measure_pair(run.models.engine, requests, drafts_first, perf_counter)
    run.unmeasured_seconds = 0.0
    run.speedups.append(pair.speedup)
    return pair
