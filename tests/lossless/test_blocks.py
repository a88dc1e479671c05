"""Drafts of whole blocks change no token: chains, trees and reduced vocabularies, switched on late, in mixed
batches, with little memory, and while responses change engines."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from tests.cases import cases
from tests.lossless.helpers import (
    BLOCKS,
    Switching,
    make_engine,
    make_policy,
    make_requests,
    step_of,
    tokens_of,
)
from tlt.base.strategy import Strategy
from tlt.base.types import ResponseId, id_of
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.drafting.learned import feature_history
from tlt.engine import memory
from tlt.models import kv_budget, kv_cache
from tlt.speculation.tuner.tuner import FixedTuner, default_arms

POLICY = make_policy()
REQUESTS = make_requests(num_problems=7, num_samples=2, seed=11)
LONG = [replace(r, params=replace(r.params, max_tokens=90, stop_ids=())) for r in REQUESTS[:10]]
CHAIN, TREE = Strategy("learned", 4, 1, 4), Strategy("learned", 4, 3, 12)
SHORT = Strategy("learned", 2, 1, 2)
forms = pytest.mark.parametrize("form", BLOCKS)


@cache
def off() -> dict[ResponseId, tuple[int, ...]]:
    """The tokens of all responses without speculation."""
    return tokens_of(make_engine(POLICY), REQUESTS)


STAR, HYBRID = Strategy("learned", 1, 4, 4), Strategy("hybrid", 6, 1, 6)


@pytest.mark.parametrize(
    ("form", "strategy", "max_batch_size"),
    cases(
        (
            (form, *case)
            for form, case in product(BLOCKS, [*product((CHAIN, TREE), (1, 5)), (STAR, 5), (HYBRID, 5)])
        ),
        usual=[
            ("dflash", CHAIN, 1),
            ("dflash", TREE, 5),
            ("dspark", TREE, 1),
            ("dspark", HYBRID, 5),
            ("reduced", CHAIN, 5),
            ("reduced", STAR, 5),
        ],
    ),
    ids=str,
)
def test_chains_and_trees_change_no_token(form: str, strategy: Strategy, max_batch_size: int) -> None:
    engine = make_engine(POLICY, FixedTuner(strategy), form, max_batch_size=max_batch_size)
    requests = REQUESTS[::2] if max_batch_size == 1 else REQUESTS
    assert tokens_of(engine, requests) == {id_of(request): off()[id_of(request)] for request in requests}
    assert engine.stats.num_verifications > 0


@pytest.mark.parametrize("form", BLOCKS)
def test_drafts_that_come_late_from_a_short_memory_change_no_token(form: str) -> None:
    tuner = Switching([Strategy.OFF, Strategy.OFF, CHAIN, SHORT, TREE], seed=3)
    engine = make_engine(POLICY, tuner, form, max_batch_size=5, window=6)
    assert tokens_of(engine, REQUESTS) == off()


@pytest.mark.parametrize(
    ("form", "num_sequences"),
    cases([("dspark", 1.0), ("dflash", 2.5), ("reduced", 2.5)], usual=[("dflash", 2.5)]),
)
def test_a_budget_that_forces_preemption_changes_no_token(
    form: str, num_sequences: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kv_budget, kv_cache, feature_history, memory):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(feature_history, "_MAX_QUEUED", 8)
    engine = make_engine(POLICY, Switching([Strategy.OFF, CHAIN, TREE], 1), form, max_batch_size=20)
    engine.memory._cache_bytes = lambda: int(num_sequences * engine.memory.slot_bytes(160))
    engine.add(LONG)
    found, drafter = {}, engine.drafter.learned.draft_cache
    while not engine.is_idle:
        found.update(step_of(engine))
        held = sum(g.nbytes for cache in (engine.cache, drafter.cache) for g in cache.groups)
        assert held + drafter.history.num_bytes <= (engine.memory.budget.max_bytes or 0)
    assert found == tokens_of(make_engine(POLICY), LONG)
    assert engine.stats.num_preemptions > 0


@forms
def test_responses_that_change_engines_on_the_way_keep_their_tokens(form: str) -> None:
    rng, found = random.Random(0), {}
    arms = [Strategy.OFF, CHAIN, TREE, *default_arms(HybridDrafter.kinds, learned_depth=4)]
    engines = [make_engine(POLICY, Switching(arms, seed), form, max_batch_size=4) for seed in range(2)]
    engines[0].add(REQUESTS)
    while not all(engine.is_idle for engine in engines):
        for engine, other in (engines, reversed(engines)):
            found.update(step_of(engine))
            if rng.random() < 0.3:
                num = len(engine.running)
                other.add(engine.withdraw(rng.sample(range(num), rng.randint(0, num))))
    assert found == off()


@forms
def test_new_weights_in_the_middle_of_a_rollout_change_no_token(form: str) -> None:
    engine, found = make_engine(POLICY, FixedTuner(CHAIN), form, max_batch_size=5), {}
    learned, version = engine.drafter.learned, 0
    engine.add(REQUESTS)
    while not engine.is_idle:
        found.update(step_of(engine))
        version += 1
        if version % 7 == 0:
            tensors = learned.model.model_class(BLOCKS[form]).initialize(version).state_dict()
            learned.load(tensors, version)
    assert found == off()
    assert {id_of(request) for request in REQUESTS} == set(found)


@forms
@pytest.mark.parametrize("strategy", cases([CHAIN, SHORT], usual=[CHAIN]), ids=str)
def test_float32_drafts_with_the_compiled_loops_are_those_of_the_plain_attention(
    form: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths: the loops are given how much each row sees, SDPA a mask."""

    def drafted(is_plain: bool) -> list[torch.Tensor]:
        engine = make_engine(POLICY, FixedTuner(strategy), form, dtype=torch.float32, max_batch_size=5)
        logits: list[torch.Tensor] = []
        head = engine.drafter.learned.model.logits
        engine.drafter.learned.model.logits = lambda *args: (logits.append(head(*args)), logits[-1])[1]
        if is_plain:
            monkeypatch.setattr("tlt.models.loops.available.load", lambda: None)
        tokens_of(engine, REQUESTS)
        return logits

    found, expected = drafted(False), drafted(True)
    assert len(found) > 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
