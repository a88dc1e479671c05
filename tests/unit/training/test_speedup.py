"""The measured speedup: the same responses with and without drafts, and an engine that remembers nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.unit.training.rollout.phase_parts import PARAMS, TREES, make_engine, make_problems
from tlt.base.records import NAN, SpeedupPair
from tlt.base.types import Request
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.protocol import Choice, StepOutcome
from tlt.speculation.tuner.tuner import default_arms
from tlt.training.speedup import (
    FIRST_GUESS,
    MAX_SHARE,
    affordable_tokens,
    measure_pair,
    pair_requests,
)

REQUESTS = pair_requests(make_problems(3), PARAMS, 5, 4, 20)
OWN = [Request(problem.problem_id, 0, problem.prompt_ids, PARAMS) for problem in make_problems(3)]


def adaptive_engine() -> RolloutEngine:
    engine, learned = make_engine()
    engine.load_drafter(HybridDrafter(learned, NgramDrafter(4)))
    engine.tuner = CostModel(default_arms(("learned", "ngram", "hybrid"), trees=False))
    return engine


def ticking(*moments: float) -> Callable[[], float]:
    left: Iterator[float] = iter(moments)
    return lambda: next(left)


def test_the_speedup_is_that_of_the_engine_steps_and_the_tokens_are_the_same_in_either_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineStats, "seconds", property(lambda stats: float(stats.num_steps)))
    engine, num_steps = make_engine()[0], {}
    for drafts in (True, False):
        with engine.without_side_effects(drafts) as stats:
            num_tokens = sum(len(one.token_ids) for one in engine.generate(REQUESTS))
            num_steps[drafts] = stats.num_steps
    assert num_steps[True] < num_steps[False]
    expected = SpeedupPair(pytest.approx(num_steps[False] / num_steps[True]), 4, num_tokens, 0, 14)
    for drafts_first in (True, False):
        assert measure_pair(engine, REQUESTS, drafts_first, ticking(0, 14)) == expected


def test_nothing_waits_for_an_environment_in_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, parked = make_engine()[0], []
    engine.parks = True
    monkeypatch.setattr(engine.memory.parking, "park", lambda response_id, _: parked.append(response_id))
    ending = [replace(one, params=replace(PARAMS, stop_ids=tuple(range(12)))) for one in REQUESTS]
    measure_pair(engine, ending, True, ticking(0, 1))
    assert not parked
    list(engine.generate(ending))
    assert parked


def test_what_is_measured_leaves_no_trace() -> None:
    engine, other = adaptive_engine(), adaptive_engine()
    for one in (engine, other):
        list(one.generate(OWN))
    drafting = engine.drafter.counters()
    learned = drafting["learned"], drafting["learned_accepted"]
    assert engine.tuner is not None
    tuned, steps, drafter = json.dumps(engine.tuner.counters()), engine.stats.num_steps, engine.drafter
    pair = measure_pair(engine, REQUESTS, True, ticking(0, 1))
    assert pair.num_different == 0
    assert json.dumps(engine.tuner.counters()) == tuned
    assert (engine.stats.num_steps, engine.drafter) == (steps, drafter)
    after = engine.drafter.counters()
    assert (after["learned"], after["learned_accepted"]) == learned
    tokens = [{r.problem_id: r.token_ids for r in one.generate(OWN)} for one in (engine, other)]
    assert tokens[0] == tokens[1]


def test_a_hundredth_of_the_seconds_is_spent_at_most() -> None:
    """A response gains 4 tokens in 0.02 s, and without drafts as many in the speedup times that."""
    stats = EngineStats()
    for _ in range(10):
        stats.record_step(Choice(TREES), StepOutcome(8, (3, 3), (6, 6), 0.02), 2)
    for before, speedup in ((NAN, FIRST_GUESS), (1.5, 1.5)):
        num = affordable_tokens(stats, 100.0, before)
        assert num / 4 * 0.02 * (1 + speedup) == pytest.approx(MAX_SHARE * 100.0, abs=0.03)
    assert affordable_tokens(EngineStats(), 100.0, NAN) == 0, "the leader had nothing to do"
