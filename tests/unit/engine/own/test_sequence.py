"""The record of drafts: who drafted which token, and what was rejected. An independent count of every tree and
the engine's statistics say the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.lossless.helpers import (
    Switching,
    by_id,
    make_engine,
    make_policy,
    make_requests,
    tokens_of,
    use_references,
)
from tlt.base.strategy import Strategy
from tlt.base.types import (
    DraftOutcome,
    DraftTree,
    Request,
    ResponseId,
    Rollout,
    SamplingParams,
    Verdict,
    id_of,
)
from tlt.drafter.drafting.retrieval.references import References
from tlt.engine.backend import RolloutBackend
from tlt.engine.own import tree_forward
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.sequence import Sequence
from tlt.speculation.law.params import Law
from tlt.speculation.law.verify import verify
from tlt.speculation.tuner.protocol import StepOutcome
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()
REQUESTS = make_requests(num_problems=3, num_samples=3, seed=5)
PLAIN = by_id(make_engine(POLICY).generate(REQUESTS))
Counted = tuple[int, int, int, int | None]
"""Tokens before a draft, drafted, accepted, rejected token."""


def engine_for(arm: str) -> RolloutEngine:
    """An engine of one strategy. References: of every second response, with an error in its middle."""
    engine = make_engine(POLICY, FixedTuner(Strategy.parse(arm)), max_batch_size=4)
    if arm.startswith("ahead"):
        references = References(None)
        for request in REQUESTS[::2]:
            right = PLAIN[id_of(request)].token_ids
            middle = len(right) // 2
            references.keep(
                request.noise_key, [*right[:middle], (right[middle] + 1) % 61, *right[middle + 1 :]]
            )
        use_references(engine, references)
    return engine


def count(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> Mapping[ResponseId, list[Counted]]:
    """Counts in every tree that the engine verifies, beside it."""
    counted: dict[ResponseId, list[Counted]] = {id_of(request): [] for request in REQUESTS}

    def counting(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        verdicts = verify(tree, logits_BNV, law)
        rows = zip(engine.running, tree.tokens_BN.tolist(), tree.parents_BN.tolist(), verdicts, strict=True)
        for row, (sequence, tokens, parents, verdict) in enumerate(rows):
            nodes = [n for n in range(1, tree.row_lengths[row]) if parents[n] >= 0]
            untaken = [n for n in nodes if parents[n] == verdict.path[-1]]
            if nodes:
                rejected = tokens[untaken[0]] if untaken else None
                outcome = sequence.num_tokens, len(nodes), len(verdict.path) - 1, rejected
                counted[id_of(sequence.request)].append(outcome)
        return verdicts

    monkeypatch.setattr(tree_forward, "verify", counting)
    return counted


def assert_account_for_all(rollouts: Collection[Rollout], engines: Collection[RolloutBackend]) -> None:
    """The drafts of a response follow each other, lie within it, and add up to what the engines counted."""
    drafts = [draft for rollout in rollouts for draft in rollout.drafts or ()]
    for rollout in rollouts:
        assert rollout.drafts is not None
        ends = [0, *(draft.place + draft.num_accepted + 1 for draft in rollout.drafts)]
        places = [*(draft.place for draft in rollout.drafts), len(rollout.token_ids)]
        assert all(end <= place for end, place in zip(ends[:-1], places, strict=False))
        assert all(place < len(rollout.token_ids) for place in places[:-1])
        for draft in rollout.drafts:
            next_place = draft.place + draft.num_accepted
            if draft.rejected is not None and next_place < len(rollout.token_ids):
                assert rollout.token_ids[next_place] != draft.rejected
    stats = [engine.stats for engine in engines]
    assert sum(draft.num_accepted for draft in drafts) == sum(s.survivors_by_depth.total() for s in stats)
    assert len(drafts) == sum(s.num_drafts for s in stats)
    assert sum(draft.num_drafted for draft in drafts) == sum(s.num_drafted_tokens for s in stats)


KINDS = {
    "learned:4x1x4": {"learned"},
    "learned:3x2x6": {"learned"},
    "ngram:6x1x6": {"ngram"},
    "ngram:4x2x8": {"ngram"},
    "hybrid:5x3x10": {"learned", "ngram"},
    "hybrid:6x1x6": {"learned", "ngram"},
    "ahead:40x1x40": {"ahead"},
    "ahead+learned:40x1x40": {"ahead", "learned"},
    "ahead+hybrid:40x1x40": {"ahead", "learned", "ngram"},
    "off": set(),
}


@pytest.mark.parametrize(("arm", "kinds"), KINDS.items())
def test_drafts_are_recorded_as_they_were_verified_and_counted(
    arm: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(arm)
    counted = count(engine, monkeypatch)
    found = by_id(engine.generate(REQUESTS))
    for key, rollout in found.items():
        assert rollout.token_ids == PLAIN[key].token_ids
        recorded = [(d.place, d.num_drafted, d.num_accepted, d.rejected) for d in rollout.drafts or ()]
        if "ahead" not in kinds:  # a long chain is verified in pieces
            assert recorded == counted[key]
    assert_account_for_all([*found.values()], [engine])
    drafts = [draft for rollout in found.values() for draft in rollout.drafts or ()]
    assert {draft.drafter for draft in drafts} == kinds
    from_references = sum(draft.num_accepted for draft in drafts if draft.drafter == "ahead")
    assert from_references == engine.stats.followed_by_age.total()
    if kinds:
        assert any(draft.rejected is not None for draft in drafts)
        assert any(draft.num_accepted > 0 for draft in drafts)


@pytest.mark.parametrize(
    "arm",
    ["ngram:4x2x8", "ngram:6x1x6", "ngram:15x4x40", "hybrid:5x3x10", "learned:3x2x6", "artificial:4x3x12"],
)
def test_acceptance_by_depth_and_the_tuners_rows_count_drafted_tokens_and_no_padding(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = (
        engine_for(arm) if arm[0] != "a" else make_engine(POLICY, FixedTuner(Strategy.parse(arm)), "random")
    )
    survivors, drafted, outcomes, deepest = Counter[int](), list[int](), list[StepOutcome](), 0

    def counting(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        nonlocal deepest
        verdicts = verify(tree, logits_BNV, law)
        for parents, verdict in zip(tree.parents_BN.tolist(), verdicts, strict=True):
            depths = {0: 0}
            for node, parent in enumerate(parents):
                if parent >= 0:
                    depths[node] = depths[parent] + 1
            drafted.append(len(depths) - 1)
            deepest = max(deepest, *depths.values())
            survivors.update(range(1, len(verdict.path)))
        return verdicts

    monkeypatch.setattr(tree_forward, "verify", counting)
    assert engine.tuner is not None
    engine.tuner.observe = lambda strategy, batch, outcome: outcomes.append(outcome)  # type: ignore[method-assign]
    by_id(engine.generate(REQUESTS))
    stats = engine.stats
    assert [num for outcome in outcomes if outcome.accepted for num in outcome.drafted] == drafted
    assert stats.num_drafted_tokens == sum(drafted) > 0
    assert sorted(stats.survivors_by_depth) == [*range(1, deepest + 1)], (
        "each depth that was drafted has a figure"
    )
    assert stats.num_drafts == sum(num > 0 for num in drafted)
    assert +stats.survivors_by_depth == survivors
    assert stats.draft_acceptance_rate == survivors.total() / sum(drafted)


@pytest.mark.parametrize("arm", ["ngram:4x2x8", "hybrid:5x3x10"])
def test_the_target_does_not_read_the_padding_of_retrieved_trees(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read, wanted = engine_for(arm), list[int](), list[int]()
    forward = engine.target.forward_capturing

    def watched(ids: Tensor, *rest: Any) -> Any:
        read.append(len(ids))
        return forward(ids, *rest)

    def counting(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        wanted.append(int((tree.parents_BN >= 0).sum()) + len(tree.parents_BN))
        assert read[-1] == wanted[-1]
        return verify(tree, logits_BNV, law)

    monkeypatch.setattr(engine.target, "forward_capturing", watched)
    monkeypatch.setattr(tree_forward, "verify", counting)
    assert tokens_of(engine, REQUESTS) == {key: rollout.token_ids for key, rollout in PLAIN.items()}
    assert len({*wanted}) > 1


@pytest.mark.parametrize("piece", [2, 3])
def test_a_chain_verified_in_pieces_is_one_draft(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_id(engine_for("ahead:30x1x30").generate(REQUESTS))
    monkeypatch.setattr(tree_forward, "PIECE", piece)
    engine = engine_for("ahead:30x1x30")
    found = by_id(engine.generate(REQUESTS))
    assert {key: one.drafts for key, one in found.items()} == {key: one.drafts for key, one in whole.items()}
    assert_account_for_all([*found.values()], [engine])


def test_responses_that_change_engines_keep_their_drafts() -> None:
    arms = [Strategy.parse(arm) for arm in ("learned:3x1x3", "ngram:5x1x5", "hybrid:4x1x4", "off")]
    engines = [make_engine(POLICY, Switching(arms, seed), max_batch_size=4) for seed in range(2)]
    rng, found, num_moved = random.Random(0), list[Rollout](), 0
    engines[0].add(REQUESTS)
    while not all(engine.is_idle for engine in engines):
        for engine, other in (engines, engines[::-1]):
            found += [finished.rollout for finished in engine.step()]
            if rng.random() < 0.3:
                partials = engine.withdraw([*range(len(engine.running))][::2])
                num_moved += sum(bool(partial.drafts) for partial in partials)
                other.add(partials)
    assert num_moved > 5
    assert_account_for_all(found, engines)


def test_what_another_engine_did_not_record_stays_unknown() -> None:
    begun = replace(
        REQUESTS[0], token_ids=PLAIN[id_of(REQUESTS[0])].token_ids[:1], logprobs=(-1.0,), drafts=None
    )
    (rollout,) = engine_for("learned:3x1x3").generate([begun])
    assert rollout.drafts is None


def test_tokens_drafted_beyond_the_end_are_counted_as_accepted_and_not_kept() -> None:
    request = Request("p", 0, (1, 2), replace(REQUESTS[0].params, max_tokens=9, stop_ids=(7,)))
    response = Sequence.start(request, 160)
    assert response.commit(Verdict((5, 7, 9, 4), 3, (0, 1, 2, 3), (-1.0,) * 4, 5, 8), drafter="learned") == 2
    assert response.to_rollout(0).drafts == (DraftOutcome(0, "learned", 5, 3, 8),)


def test_a_stop_text_is_found_however_many_special_tokens_lie_between_its_letters() -> None:
    """Token 0 is special: decoding leaves it out."""

    def decode(tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens if token)

    for num_between in (0, 1, 20, 500):
        params = SamplingParams(max_tokens=2000, stop=("ab",))
        sequence = Sequence.start(Request("p", 0, (1, 2), params), 4096, decode)
        for token in (3, 1, *[0] * num_between, 2):
            assert sequence.finish_reason is None
            sequence.extend((token,), (0.0,), decode)
        assert sequence.finish_reason == "stop"
        assert len(sequence.response_ids) == 3 + num_between


def test_a_begun_response_ends_at_a_stop_text_in_its_middle() -> None:
    params = SamplingParams(max_tokens=20, stop=("ab",))
    begun = Request("p", 0, (1, 2), params, token_ids=(3, 1, 2, 3, 4), logprobs=(-1.0,) * 5)
    sequence = Sequence.start(begun, 4096, lambda tokens: "".join(chr(96 + token) for token in tokens))
    assert (sequence.finish_reason, sequence.response_ids) == ("stop", (3, 1, 2))
    assert len(sequence.logprobs) == 3
