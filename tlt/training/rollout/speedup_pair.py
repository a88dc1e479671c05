"""The speedup of speculation: the same responses, generated with and without drafts.

with      ▕██████▏                    the same requests, noise and tokens in both; the order alternates
without   ▕██████████████▏            speedup = their ratio of tokens per second, prefills aside
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tlt.base.records import SpeedupPair
from tlt.base.types import Problem, Request, SamplingParams, id_of
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats

MAX_SHARE = 0.01
"""Share of the rollouts' seconds that measuring may take, prefills aside."""
MIN_TOKENS = 64
"""Fewest tokens of a response: in shorter ones the tuner drafts less than in a rollout, and the speedup is
too low (benchmarks/log.md)."""
FIRST_GUESS = 2.0
"""Speedup assumed before the first pair, whose time it alone bounds."""


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
