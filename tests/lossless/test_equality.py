"""The promise: speculation changes nothing but the time. Token for token, against a referee that knows no
engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import (
    CONFIG,
    PARAMS,
    ArtificialDrafter,
    Switching,
    make_engine,
    make_policy,
    make_requests,
    referee,
    step_of,
    to_transformers,
    tokens_of,
)
from tlt.base.speculation import Adaptive
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, ResponseId, Rollout, Verdict, id_of
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter
from tlt.engine.own import tree_forward
from tlt.engine.own.engine import RolloutEngine
from tlt.models.attention import PackedCausal
from tlt.speculation.law.params import Law
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor
from tlt.speculation.law.verify import verify
from tlt.speculation.tuner.protocol import BatchState, StepOutcome
from tlt.speculation.tuner.tuner import FixedTuner, default_arms, make_tuner

POLICY = make_policy()
REQUESTS = make_requests(num_problems=7, num_samples=2, seed=11)
FEW = REQUESTS[::2]
"""One response to each prompt, and of each sampling setting: for engines that take one at a time."""

STRATEGIES = [
    Strategy("learned", *shape)
    for shape in [(1, 1, 1), (4, 1, 4), (7, 1, 7), (1, 4, 4), (3, 2, 6), (4, 4, 16), (5, 3, 40)]
]
RETRIEVING = [
    Strategy(kind, *shape)
    for kind in ("ngram", "hybrid")
    for shape in [(1, 1, 1), (6, 1, 6), (3, 2, 6), (5, 3, 12)]
]
ARMS = default_arms(HybridDrafter.kinds)


@cache
def off() -> dict[ResponseId, tuple[int, ...]]:
    """The tokens of all responses without speculation."""
    return tokens_of(make_engine(POLICY), REQUESTS)


def assert_same_as_off(engine: RolloutEngine, requests: Sequence[Request]) -> None:
    assert tokens_of(engine, requests) == {id_of(request): off()[id_of(request)] for request in requests}


def test_without_speculation_the_engine_says_what_transformers_and_the_law_say() -> None:
    model = to_transformers(POLICY)
    assert {id_of(request): referee(model, request) for request in REQUESTS} == off()


ALL = {*STRATEGIES, *RETRIEVING}
CASES = [*((arm, 3) for arm in STRATEGIES + RETRIEVING),
         *((arm, size) for arm in (STRATEGIES[1], STRATEGIES[4], RETRIEVING[1], RETRIEVING[6]) for size in (1, 28)),
         *((arm, 7) for arm in ARMS[::2] if not arm.is_off and arm not in ALL)]  # fmt: skip
USUAL = [
    *((arm, 3) for arm in (*STRATEGIES[1:6:2], *RETRIEVING[1:3], RETRIEVING[6])),
    (STRATEGIES[4], 1),
    (STRATEGIES[1], 28),
]
"""A chain or trees of each drafter, and both ends of the batch sizes."""


@pytest.mark.parametrize(("strategy", "max_batch_size"), cases(CASES, USUAL), ids=str)
def test_chains_and_trees_of_every_drafter_change_no_token(strategy: Strategy, max_batch_size: int) -> None:
    engine = make_engine(POLICY, FixedTuner(strategy), max_batch_size=max_batch_size)
    assert_same_as_off(engine, FEW if max_batch_size == 1 else REQUESTS)
    assert engine.stats.num_verifications > 0


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[4], RETRIEVING[5]], ids=str)
def test_a_short_memory_changes_no_token(strategy: Strategy) -> None:
    """A window of 6 positions is left behind by every stretch without speculation."""
    tuner = Switching([Strategy.OFF, Strategy.OFF, strategy], seed=3)
    engine = make_engine(POLICY, tuner, max_batch_size=5, window=6)
    assert tokens_of(engine, REQUESTS) == off()
    assert engine.stats.num_verifications > 0


@pytest.mark.parametrize("kind", ["ngram", "hybrid"])
@pytest.mark.parametrize("max_batch_size", [1, 6])
def test_chains_as_long_as_what_was_retrieved_change_no_token(
    kind: str, max_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, is_ragged = set(), False
    engine = make_engine(POLICY, FixedTuner(Strategy(kind, 8, 1, 8)), max_batch_size=max_batch_size)

    def watched(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        nonlocal is_ragged
        widths.add(tree.num_nodes)
        is_ragged |= tree.lengths is not None
        return verify(tree, logits_BNV, law)

    off()  # not watched
    monkeypatch.setattr(tree_forward, "verify", watched)
    assert_same_as_off(engine, REQUESTS)
    assert len(widths) > 1
    assert is_ragged == (max_batch_size > 1)


@pytest.mark.parametrize("drafter", ["learned", "ngram"])
def test_the_tuners_own_choices_change_no_token(drafter: str) -> None:
    kinds = HybridDrafter.kinds if drafter == "learned" else NgramDrafter.kinds
    tuner = make_tuner(Adaptive(), kinds)
    assert tuner is not None
    observe, rng = tuner.observe, random.Random(0)

    def observe_by_a_wild_clock(strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        observe(strategy, batch, replace(outcome, seconds=rng.lognormvariate(-5 + strategy.is_off, 1)))

    tuner.observe = observe_by_a_wild_clock  # type: ignore[method-assign]  # a clock that says anything
    engine = make_engine(POLICY, tuner, drafter=drafter, max_batch_size=5)
    for _ in range(2):
        assert tokens_of(engine, REQUESTS) == off()
    assert len(engine.stats.by_strategy) > 2


@pytest.mark.parametrize("kind", ["random", "adversarial", "oracle"])
@pytest.mark.parametrize("seed", range(2))
def test_random_trees_of_random_and_adversarial_drafters_change_no_token(kind: str, seed: int) -> None:
    engine = make_engine(POLICY, FixedTuner(Strategy("artificial", 5, 3, 12)), drafter=kind, max_batch_size=6)
    engine.load_drafter(ArtificialDrafter(kind, seed, off()))
    assert tokens_of(engine, REQUESTS) == off()
    accept_length = engine.stats.accept_length
    assert accept_length is not None
    assert (accept_length > 1.5) == (kind == "oracle")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_batch_composition_order_and_strategy_gives_the_same_tokens(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=12, unique=True))
    slots = data.draw(st.integers(1, 12))
    seed = data.draw(st.integers(0, 1 << 16))
    use_tuner = data.draw(st.booleans())
    arms = data.draw(st.lists(st.sampled_from([*ARMS, *RETRIEVING]), min_size=1, max_size=6))
    window = data.draw(st.sampled_from([5, 40, 4096]))
    tuner = Switching(arms, seed) if use_tuner else None
    engine = make_engine(POLICY, tuner, max_batch_size=slots, window=window)
    pending, found, rng = list(chosen), {}, random.Random(seed)
    while pending or not engine.is_idle:  # requests arrive while others run
        for _ in range(rng.randint(0, len(pending))):
            engine.add([pending.pop()])
        found.update(step_of(engine))
    assert found == {id_of(request): off()[id_of(request)] for request in chosen}


@pytest.mark.parametrize(("seed", "slots"), [(0, 3), (1, 28)])
def test_responses_that_change_engines_on_the_way_keep_tokens_logprobs_and_features(
    seed: int, slots: int
) -> None:
    """Each is read again where it goes on, beside others, under another strategy, in a slot that others
    have used."""
    features: dict[str, dict[tuple[str, int], torch.Tensor]] = {"staying": {}, "moving": {}}
    logprobs: dict[tuple[str, int], tuple[float, ...]] = {}

    def step(engine: RolloutEngine, name: str) -> Iterator[Rollout]:
        for finished in engine.step(captures=True):
            assert finished.captured_TF is not None
            features[name][id_of(finished.rollout)] = finished.captured_TF
            yield finished.rollout

    staying = make_engine(POLICY, FixedTuner(STRATEGIES[1]), max_batch_size=slots)
    staying.add(REQUESTS)
    while not staying.is_idle:
        for rollout in step(staying, "staying"):
            logprobs[id_of(rollout)] = rollout.logprobs
    rng, num_moved, found = random.Random(seed), 0, {}
    tuners = [Switching([*ARMS, Strategy.OFF], seed + i) for i in range(2)]
    engines = [make_engine(POLICY, tuner, max_batch_size=slots) for tuner in tuners]
    engines[0].add(REQUESTS)
    while not all(engine.is_idle for engine in engines):
        for engine, other in (engines, reversed(engines)):
            for rollout in step(engine, "moving"):
                found[id_of(rollout)] = rollout.token_ids
                assert rollout.logprobs == pytest.approx(logprobs[id_of(rollout)], abs=1e-9)
            if rng.random() < 0.3:
                num = len(engine.running)
                partials = engine.withdraw(rng.sample(range(num), rng.randint(0, num)))
                other.add(partials)
                num_moved += sum(bool(partial.token_ids) for partial in partials)
    assert found == off()
    assert num_moved > 20
    for key, expected in features["staying"].items():
        torch.testing.assert_close(features["moving"][key], expected, rtol=0, atol=1e-9)


def test_an_aborted_rollout_is_generated_again_token_for_token() -> None:
    engine = make_engine(POLICY, FixedTuner(STRATEGIES[1]))
    engine.add(REQUESTS)
    for _ in range(5):
        engine.step()
    engine.abort()
    assert tokens_of(engine, REQUESTS) == off()


def test_logprobs_are_those_of_the_trainers_forward() -> None:
    engine = make_engine(POLICY, FixedTuner(STRATEGIES[4]))
    requests = {id_of(request): request for request in REQUESTS}
    for rollout in engine.generate(REQUESTS):
        request = requests[id_of(rollout)]
        tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        attend = PackedCausal(CONFIG, [len(tokens) - 1])
        logits = POLICY.logits(POLICY(tokens[:-1], attend.positions(), attend))
        logits = logits / (request.params.temperature or 1.0)
        expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[-len(rollout.token_ids) :, 0]
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-9)


def test_in_float32_almost_all_sequences_agree_and_every_difference_begins_at_a_near_tie() -> None:
    """Of 300 sequences 1 may differ, and only from a token on whose margin in float64 is below 1e-3."""
    requests = make_requests(num_problems=75, num_samples=4, seed=5, params=PARAMS)
    plain = tokens_of(make_engine(POLICY, dtype=torch.float32, max_batch_size=64), requests)
    tuner = Switching(STRATEGIES, seed=0)
    speculated = tokens_of(make_engine(POLICY, tuner, dtype=torch.float32, max_batch_size=64), requests)
    different = [request for request in requests if plain[id_of(request)] != speculated[id_of(request)]]
    for request in different:
        response_id = id_of(request)
        assert _margin_of_first_difference(request, plain[response_id], speculated[response_id]) < 1e-3
    assert len(different) <= 1


def _margin_of_first_difference(request: Request, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """By how much, in float64, the better of the two tokens beats the other under the law."""
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    tokens = torch.tensor(request.prompt_ids + a[:first])
    attend = PackedCausal(CONFIG, [len(tokens)])
    logits = POLICY.logits(POLICY(tokens, attend.positions(), attend))[-1]
    logits = logits / (request.params.temperature or 1.0)
    noise = gumbel_noise(keys_tensor([request.noise_key]), torch.tensor([[len(tokens)]]), CONFIG.vocab_size)[
        0, 0
    ]
    scores = logits + (noise if request.params.temperature > 0 else 0.0)
    return abs(float(scores[a[first]] - scores[b[first]]))
