"""Drafting from references changes no token, whatever they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lossless.helpers import CONFIG, STOP, VOCAB, by_id, make_engine, make_policy, use_references
from tests.reference_kinds import KINDS, reference_of
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout, SamplingParams, id_of
from tlt.drafter.drafting.reference_drafter import ReferenceCursor, ReferenceDrafter
from tlt.drafter.drafting.retrieval.references import Reference, References
from tlt.engine.own import tree_forward
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.protocol import BatchState, Choice, StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner, default_arms

PARAMS = (SamplingParams(1.0), SamplingParams(0.0), SamplingParams(0.8, top_k=9, top_p=0.95, min_p=0.02))
ARMS = ("ahead:8x1x8", "ahead:100x1x100", "ahead+learned:64x1x64", "ahead+learned:5x1x5")


def requests_for(num: int = 9, max_tokens: int = 110) -> list[Request]:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 30))) for _ in range(3)]
    found = []
    for i in range(num):
        params = replace(PARAMS[i % 3], max_tokens=max_tokens, stop_ids=(STOP,) if i % 2 else (), seed=4)
        found.append(Request(f"p{i % 3}", i // 3, prompts[i % 3], params))
    return found


@cache
def plain() -> dict[tuple[str, int], Rollout]:
    return by_id(make_engine(make_policy()).generate(requests_for()))


def engine_with(tuner: StrategyTuner, kinds: Sequence[str]) -> RolloutEngine:
    rng, references = random.Random(1), References(None)
    for request, kind in zip(requests_for(), kinds, strict=True):
        right, other = (plain()[key].token_ids for key in (id_of(request), ("p0", 0)))
        reference = reference_of(kind, right, other, rng, range(8, VOCAB))
        if reference is not None:
            references.keep(request.noise_key, reference)
    engine = make_engine(make_policy(), tuner)
    use_references(engine, references)
    return engine


def assert_plain(engine: RolloutEngine) -> None:
    found = by_id(engine.generate(requests_for()))
    for key, rollout in plain().items():
        assert found[key].token_ids == rollout.token_ids, key
        assert found[key].finish_reason == rollout.finish_reason
        assert max(abs(a - b) for a, b in zip(found[key].logprobs, rollout.logprobs, strict=True)) < 1e-9


@settings(max_examples=3, deadline=None)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=9, max_size=9), arm=st.sampled_from(ARMS))
def test_no_reference_changes_a_token(kinds: list[str], arm: str) -> None:
    assert_plain(engine_with(FixedTuner(Strategy.parse(arm)), kinds))


def test_a_tuner_that_may_use_references_changes_no_token() -> None:
    arms = default_arms(("learned", "ngram", "hybrid", "ahead", "ahead+hybrid"), trees=False)
    assert {arm.depth for arm in arms if arm.uses_references} == {32, 64, 128, 256}
    engine = engine_with(CostModel(arms), KINDS)
    assert_plain(engine)


def test_a_long_chain_is_accepted_as_far_in_pieces_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_lengths = []
    for piece in (2, 33, 1000):
        monkeypatch.setattr(tree_forward, "PIECE", piece)
        engine = engine_with(
            FixedTuner(Strategy.parse("ahead:100x1x100")), ["right", "one differs", "truncated"] * 3
        )
        assert_plain(engine)
        accept_lengths.append(engine.stats.accept_length)
    assert accept_lengths == [accept_lengths[-1]] * 3


class Slow(FixedTuner):
    def choose(self, batch: BatchState) -> Choice:
        return Choice(self.strategy, otherwise=0.01)


def test_the_engine_counts_the_seconds_that_references_have_won_and_no_others() -> None:
    engine, silent = (
        engine_with(tuner(Strategy.parse("ahead:100x1x100")), ["right"] * 9) for tuner in (Slow, FixedTuner)
    )
    assert_plain(engine)
    assert_plain(silent)
    assert engine.stats.accept_length is not None
    assert engine.stats.accept_length > 20, "a right reference is drafted to its end"
    expected = 100.0 * engine.stats.num_tokens
    assert expected > 0
    assert engine.stats.won_seconds == pytest.approx(expected, rel=0.01)
    both = EngineStats()
    both.add(engine.stats)
    both.add(engine.stats)
    assert both.won_seconds == pytest.approx(2 * expected, rel=0.01)
    assert silent.stats.won_seconds == 0.0


def test_logits_of_a_long_chain_are_asked_for_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(FixedTuner(Strategy.parse("ahead:100x1x100")), ["right", "wrong", "one differs"] * 3)
    sizes, logits = [], engine.target.logits
    monkeypatch.setattr(
        engine.target, "logits", lambda features: (sizes.append(len(features)), logits(features))[1]
    )
    assert_plain(engine)
    assert max(sizes) <= 8 * tree_forward.PIECE


def test_after_a_difference_the_place_is_found_again() -> None:
    """A token too many, then the same words: the rest is drafted three places on."""
    reference = list(range(10, 60))
    cursor, prompt = ReferenceCursor(Reference(reference), 2), [1, 2]
    tokens = [*prompt, *reference[:20], 7, 8, 9, *reference[20:30]]
    for end in range(2, len(tokens) + 1):
        cursor.read(tokens[:end])
    assert list(cursor.next_tokens(4)) == reference[30:34]
    assert cursor.cell[0] == 2, "at another position than the response's own"


def test_a_single_difference_leaves_the_place_where_it_is() -> None:
    reference = list(range(10, 60))
    cursor = ReferenceCursor(Reference(reference), 0)
    cursor.read([*reference[:20], 7])
    assert list(cursor.next_tokens(3)) == reference[21:24]
    assert cursor.cell == (1, 0)


def drafter_with(reference: Sequence[int]) -> tuple[ReferenceDrafter, list[int]]:
    """A drafter whose slot 0 has a sequence with this reference, and the sequence's prompt."""
    request, references = requests_for(1)[0], References(None)
    references.keep(request.noise_key, reference)
    drafter = use_references(make_engine(make_policy(), FixedTuner(Strategy.OFF)), references, 1)
    drafter.admit(0, request)
    return drafter, [*request.prompt_ids]


def test_a_difference_is_known_when_the_next_step_is_chosen() -> None:
    """The tokens of the step before are compared before the tuner chooses, drafted or not."""
    reference = list(range(8, 48))
    drafter, prompt = drafter_with(reference)
    assert [draft.length for draft in drafter.reference_drafts([[*prompt, *reference[:10]]])] == [30]
    (draft,) = drafter.reference_drafts([[*prompt, *reference[:10], 7]])
    assert draft.length == 1, "after a difference its acceptance is not known yet"


def test_a_case_that_is_not_drafted_from_recovers_by_what_is_committed_without_drafts() -> None:
    reference = [8 + i % 50 for i in range(400)]
    drafter, tokens = drafter_with(reference)
    tokens += [7, *([60] * 40)]
    assert drafter.reference_drafts([tokens]) == (), "it has said none of forty"
    for token in reference[41:200]:
        tokens.append(token)
        drafter.reference_drafts([tokens])
    (draft,) = drafter.reference_drafts([tokens])
    assert draft.length > 16


def test_references_are_bounded_and_the_first_leave_first() -> None:
    references = References(40 * 4 / 2**20)
    for i in range(6):
        references.keep((i, 0, 0, 0), range(10))
    references.keep((5, 0, 0, 0), range(5))
    assert [references.get((i, 0, 0, 0)) is not None for i in range(6)] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert references.num_tokens == 35
    none = References(0)
    none.keep((0, 0, 0, 0), range(3))
    assert not len(none)


def test_a_reference_to_a_token_without_an_embedding_changes_nothing() -> None:
    """A row of the embedding that is never drawn may hold anything: no draft may bring it into the cache."""
    config = replace(CONFIG, tie_embeddings=False)
    policy, hole = make_policy(config=config), 60
    with torch.no_grad():
        policy.get_parameter("model.embed_tokens.weight")[hole] = float("nan")
        policy.get_parameter("lm_head.weight")[hole] = 0.0
    requests = [
        replace(request, params=replace(request.params, temperature=0.0)) for request in requests_for()
    ]
    want = by_id(make_engine(policy).generate(requests))
    references = References(None)
    for request in requests:
        right = want[request.problem_id, request.sample_index].token_ids
        references.keep(request.noise_key, [*right[:3], hole, *right[4:]])
    engine = make_engine(policy, FixedTuner(Strategy.parse("ahead:8x1x8")))
    use_references(engine, references)
    for key, rollout in by_id(engine.generate(requests)).items():
        assert rollout.token_ids == want[key].token_ids
    assert engine.stats.num_verifications > 0


def test_the_window_ends_a_draft() -> None:
    request = Request("w", 0, (9,) * 30, SamplingParams(1.0, max_tokens=CONFIG.max_positions - 30, seed=2))
    (want,) = make_engine(make_policy()).generate([request])
    references = References(None)
    references.keep(request.noise_key, [*want.token_ids, *range(8, 60)])
    engine = make_engine(make_policy(), FixedTuner(Strategy.parse("ahead:256x1x256")))
    use_references(engine, references)
    (found,) = engine.generate([request])
    assert found.token_ids == want.token_ids
