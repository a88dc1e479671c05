"""A memory that is too small for the batch changes the time alone: sequences leave, come back, and go on
as they would have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.lossless.helpers import (
    CONFIG,
    PARAMS,
    STOP,
    VOCAB,
    Switching,
    make_engine,
    make_policy,
    step_of,
    tokens_of,
)
from tests.refused import refused
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams, id_of
from tlt.drafter.drafting.learned import feature_history
from tlt.engine import memory
from tlt.engine.memory import automatic_bytes, machine_bytes
from tlt.engine.own.engine import RolloutEngine
from tlt.models import kv_budget, kv_cache
from tlt.models.kv_budget import Budget
from tlt.models.kv_cache import Cache
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner, default_arms

POLICY = make_policy()
STRATEGIES = [
    Strategy.OFF,
    *(Strategy("learned", *shape) for shape in [(4, 1, 4), (4, 4, 16)]),
    *(Strategy(kind, *shape) for kind in ("ngram", "hybrid") for shape in [(6, 1, 6), (3, 2, 6)]),
]
BLOCK = 8
"""Blocks of so few tokens, so that the tiny sequences here take many."""


def requests(num_problems: int = 5, num_samples: int = 4, seed: int = 3) -> list[Request]:
    """Prompts short and long (up to 60 tokens), every sampling setting in turn, responses of up to 90
    tokens."""
    rng, found = random.Random(seed), []
    for problem in range(num_problems):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([2, 7, 60])))
        for index in range(num_samples):
            base = PARAMS[(problem * num_samples + index) % len(PARAMS)]
            law = replace(base, max_tokens=rng.randint(20, 90), seed=seed)
            found.append(Request(f"p{problem}", index, prompt, law))
    return found


REQUESTS = requests()
AMPLE = tokens_of(make_engine(POLICY, max_batch_size=20), REQUESTS)
FEW = REQUESTS[::2]
"""Every sampling setting once or twice."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_budget, kv_cache, feature_history, memory):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr("tlt.drafter.drafting.learned.pair_cache._CATCH_UP_TOKENS", 16)
    monkeypatch.setattr("tlt.drafter.drafting.learned.pair_cache.SPARE_COLUMNS", 96)
    monkeypatch.setattr(feature_history, "_MAX_QUEUED", 8)
    monkeypatch.setattr("tlt.models.kv_cache.GROUP_BYTES", 1)  # every layer a tensor of its own


def limited(tuner: StrategyTuner | None, num_sequences: float, drafter: str = "learned") -> RolloutEngine:
    """Returns an engine with memory for `num_sequences` of the longest sequences."""
    engine = make_engine(POLICY, tuner, drafter=drafter, max_batch_size=20)
    engine.memory._cache_bytes = lambda: int(num_sequences * engine.memory.slot_bytes(CONFIG.max_positions))
    return engine


def bytes_held(engine: RolloutEngine) -> int:
    held = [engine.cache]
    total = 0
    if engine.drafter is not None and engine.drafter.kinds != ("ngram",):
        pairs = engine.drafter.learned.draft_cache
        held.append(pairs.cache)
        total += pairs.history.num_bytes
    return total + sum(group.nbytes for cache in held for group in cache.groups)


@pytest.mark.parametrize(
    ("strategy", "num_sequences"),
    cases(
        [
            *((strategy, 1.0) for strategy in STRATEGIES[::2]),
            *((strategy, 2.5) for strategy in STRATEGIES[1::2]),
        ],
        usual=[(STRATEGIES[0], 1.0), (STRATEGIES[1], 2.5), (STRATEGIES[4], 1.0), (STRATEGIES[5], 2.5)],
    ),
    ids=str,
)
def test_a_budget_that_forces_preemption_changes_no_token(strategy: Strategy, num_sequences: float) -> None:
    drafter = "ngram" if strategy.drafter == "ngram" else "learned"
    engine, asked = limited(FixedTuner(strategy), num_sequences, drafter), FEW
    engine.add(asked)
    found, limit = {}, engine.memory.budget.max_bytes
    assert limit is not None
    while not engine.is_idle:
        found.update(step_of(engine))
        assert bytes_held(engine) <= limit
    assert found == {id_of(request): AMPLE[id_of(request)] for request in asked}
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_reread_tokens >= engine.stats.num_preemptions


@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_budget_any_drafts_and_any_hand_over_give_the_same_tokens(data: st.DataObject) -> None:
    """Responses go back and forth between two engines, each with a memory of its own, while requests still
    arrive."""
    rng = random.Random(data.draw(st.integers(0, 1 << 16)))
    arms = [Strategy.OFF, *default_arms(("learned", "ngram", "hybrid"))]
    sizes = [data.draw(st.floats(1.0, 8.0)) for _ in range(2)]
    engines = [limited(Switching(arms, rng.randrange(99)), size) for size in sizes]
    pending, found = list(FEW), {}
    while pending or not all(engine.is_idle for engine in engines):
        for engine, other in (engines, reversed(engines)):
            for _ in range(rng.randint(0, len(pending))):
                engine.add([pending.pop()])
            found.update(step_of(engine))
            if rng.random() < 0.1:
                other.add(engine.withdraw(rng.sample(range(len(engine.running)), len(engine.running) // 2)))
                other.add(engine.withdraw_waiting(engine.num_waiting // 2))
    assert found == {id_of(request): AMPLE[id_of(request)] for request in FEW}


def test_what_was_captured_of_a_preempted_response_is_whole() -> None:
    def features(engine: RolloutEngine) -> dict[tuple[str, int], torch.Tensor]:
        engine.add(REQUESTS)
        found = {}
        while not engine.is_idle:
            for one in engine.step(captures=True):
                assert one.captured_TF is not None
                found[id_of(one.rollout)] = one.captured_TF
        return found

    small = limited(FixedTuner(STRATEGIES[1]), 3.0)
    expected, found = (
        features(make_engine(POLICY, FixedTuner(STRATEGIES[1]), max_batch_size=20)),
        features(small),
    )
    assert small.stats.num_preemptions > 0
    for key, captured_TF in expected.items():
        torch.testing.assert_close(found[key], captured_TF, rtol=0, atol=1e-9)


def test_the_shortest_leaves_first_and_comes_back_before_what_has_not_begun() -> None:
    engine = limited(None, 1.6)
    engine.scheduler.max_slots, law = 2, SamplingParams(max_tokens=130)
    long, short, fresh = (
        Request(name, 0, (5,) * length, law) for name, length in (("long", 30), ("short", 3), ("fresh", 3))
    )
    engine.add([long, short, fresh])
    engine.step()
    assert len(engine.running) == 2
    while len(engine.running) > 1:
        engine.step()
    waiting = engine.scheduler.waiting
    assert [s.request.problem_id for s in engine.running] == ["long"]
    assert [request.problem_id for request in waiting] == ["short", "fresh"]
    assert waiting[0].token_ids
    assert len(waiting[0].logprobs) == len(waiting[0].token_ids)
    assert engine.room == 0


def test_what_comes_back_has_room_to_go_on_for_a_while() -> None:
    """Every time a response is read again, it goes on for at least a block: the memory is not spent on
    reading."""
    engine = limited(None, 4.0)
    engine.add(REQUESTS)
    while not engine.is_idle:
        engine.step()
    num_tokens = sum(map(len, AMPLE.values()))
    assert engine.stats.num_preemptions < num_tokens / BLOCK
    assert engine.stats.num_tokens == num_tokens, "none is generated twice"


def test_a_sequence_that_does_not_fit_alone_is_refused_with_the_key_and_its_number() -> None:
    engine = limited(None, 0.5)
    with refused(r"kv_gib: .* hold 80 tokens .*'big'.* may have 160; give kv_gib at least"):
        engine.add([Request("big", 0, (1,) * 100, SamplingParams(max_tokens=500))])
    engine.add([Request("fits", 0, (1,) * 10, SamplingParams(max_tokens=70, stop_ids=(STOP,)))])
    assert engine.num_waiting == 1


def test_caches_grow_within_their_budget_and_ahead_where_it_allows() -> None:
    def cache(max_tokens: int | None) -> tuple[Cache, Budget]:
        storage = Cache(CONFIG, CONFIG.num_layers, torch.float64, torch.device("cpu"), 16)
        return storage, Budget(
            None if max_tokens is None else storage.slot_bytes(max_tokens), storage.slot_bytes
        )

    free, unbounded = cache(None)
    tight, budget = cache(100 * BLOCK)
    for storage, bound in ((free, unbounded), (tight, budget)):
        storage.reserve(4, 10 * BLOCK, bound)
        storage.reserve(4, 14 * BLOCK, bound)
    assert (free.num_slots, free.capacity) == (4, 20 * BLOCK)
    assert (tight.num_slots, tight.capacity) == (4, 20 * BLOCK)
    tight.reserve(4, 21 * BLOCK, budget)
    assert (tight.num_slots, tight.capacity) == (4, 25 * BLOCK), "as far as the budget goes"
    tight.reserve(9, 11 * BLOCK, budget)
    assert (tight.num_slots, tight.capacity) == (9, 11 * BLOCK), "more slots, each shorter"


def test_growing_keeps_what_was_there() -> None:
    storage = Cache(CONFIG, CONFIG.num_layers, torch.float64, torch.device("cpu"), 8)
    storage.reserve(2, BLOCK)
    for layer in storage.layers:
        layer.copy_(torch.randn(layer.shape, dtype=layer.dtype))
    before = [layer[:, :, :5].clone() for layer in storage.layers]
    storage.reserve(2, 3 * BLOCK)
    storage.reserve(5, 3 * BLOCK)
    assert len(storage.groups) == CONFIG.num_layers
    for old, layer in zip(before, storage.layers, strict=True):
        assert torch.equal(layer[:2, :, :5], old)
        assert not layer[2:].any()


def test_the_automatic_budget_is_a_share_of_the_machine_for_each_rank() -> None:
    total = machine_bytes()
    assert automatic_bytes(torch.device("cpu"), 2) * 4 == pytest.approx(total, abs=8)


def test_the_automatic_budget_of_a_gpu_counts_what_pytorch_has_reserved_and_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800, 2000))
    assert automatic_bytes(torch.device("cuda"), 4) == 800


def long_prompts(lengths: Sequence[int]) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(str(i), j, tuple(rng.randrange(VOCAB) for _ in range(n)), SamplingParams(max_tokens=12))
        for i, n in enumerate(lengths)
        for j in range(2)
    ]


@pytest.mark.parametrize("strategy", [Strategy.OFF, Strategy("hybrid", 4, 2, 8)], ids=str)
def test_a_long_prompt_read_in_parts_says_the_same(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = long_prompts([1, 9, 130, 40, 90])
    expected = tokens_of(make_engine(POLICY, FixedTuner(strategy), max_batch_size=20), asked)
    monkeypatch.setattr("tlt.models.kv_cache.PREFILL_TOKENS", 33)
    monkeypatch.setattr("tlt.engine.own.prefill._PART_TOKENS", 16)
    engine, sizes = make_engine(POLICY, FixedTuner(strategy), max_batch_size=20), list[int]()
    forward = engine.target.forward_capturing

    def watched(tokens_N: torch.Tensor, *rest: object) -> object:
        sizes.append(len(tokens_N))
        return forward(tokens_N, *rest)

    engine.target.forward_capturing = watched
    engine.add(asked)
    engine.memory.reserve(1, 1)
    engine._prefill(engine.scheduler.admit(engine.memory.fits_longer))
    assert max(sizes) <= 33
    assert tokens_of(engine, []) == expected
