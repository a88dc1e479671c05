"""The speedup of speculation within a run: every few steps, after the rollout, the leader generates the same
responses with and without drafts.

with      ▕██████▏                    the same requests, noise and tokens in both; the order alternates
without   ▕██████████████▏            speedup = their ratio of tokens per second, prefills aside
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from tlt.base.records import NAN, SpeedupPair
from tlt.base.spans import SpanName
from tlt.base.types import Problem, Request, SamplingParams, id_of
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.training.ranks.world import gather_objects
from tlt.training.rollout.result import PhaseResult

if TYPE_CHECKING:
    from tlt.training.run import Run

NOT_MEASURED = SpeedupPair()
MAX_SHARE = 0.01
"""Share of the rollouts' seconds that measuring may take, prefills aside."""
MIN_TOKENS = 64
"""Fewest tokens of a response: in shorter ones the tuner drafts less than in a rollout, and the speedup is
too low (benchmarks/log.md)."""
FIRST_GUESS = 2.0
"""Speedup assumed before the first pair, whose time it alone bounds."""


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


def affordable_tokens(stats: EngineStats, seconds: float, speedup: float) -> int:
    """Tokens of each response that can be generated twice in MAX_SHARE of `seconds`.

    stats: of an engine that has generated as many responses at a time.
    speedup: of the previous pair; NaN: none, and FIRST_GUESS stands in.
    """
    if not stats.sequence_seconds:
        return 0
    speed = stats.num_tokens / stats.sequence_seconds  # of one response, with drafts
    if math.isnan(speedup):
        speedup = FIRST_GUESS
    return int(MAX_SHARE * seconds * speed / (1 + speedup))


def pair_requests(
    problems: Sequence[Problem], params: SamplingParams, step: int, num: int, num_tokens: int
) -> list[Request]:
    """With noise that no other response of a run has. step: each begins with other problems."""
    params = replace(params, max_tokens=min(num_tokens, params.max_tokens))
    asked = [(problems[(step * num + i) % len(problems)], i) for i in range(num)]
    return [Request(p.problem_id, i, p.prompt_ids, params, "generate", step) for p, i in asked]


def measure_pair(
    engine: RolloutBackend, requests: Sequence[Request], drafts_first: bool, clock: Callable[[], float]
) -> SpeedupPair:
    """The engine must be idle; its state does not change."""
    start, speed, tokens = clock(), {}, {}
    for drafts in (drafts_first, not drafts_first):
        with engine.without_side_effects(drafts) as stats:
            tokens[drafts] = {id_of(one): one.token_ids for one in engine.generate(requests)}
            speed[drafts] = stats.num_tokens / stats.seconds
    return SpeedupPair(
        speedup=speed[True] / speed[False],
        num_responses=len(requests),
        num_tokens=sum(map(len, tokens[True].values())),
        num_different=sum(tokens[True][one] != tokens[False][one] for one in tokens[True]),
        seconds=clock() - start,
    )
