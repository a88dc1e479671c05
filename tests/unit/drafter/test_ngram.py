"""Retrieval: what is found, what is forgotten, and how candidates are ranked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lossless.helpers import Given, by_id, make_engine, make_policy
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, SamplingParams, Verdict
from tlt.drafter.drafting.hybrid import HybridDrafter, HybridProposal
from tlt.drafter.drafting.learned.drafter import LearnedProposal
from tlt.drafter.drafting.retrieval import continuations, ngram, suffix_index
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter, NgramProposal
from tlt.drafter.drafting.retrieval.suffix_index import ANCHORS, SuffixIndex
from tlt.drafter.protocol import DraftContext, DraftNoise
from tlt.engine.stats import EngineStats
from tlt.speculation.law.params import BatchParams
from tlt.speculation.tuner.tuner import FixedTuner

CPU = torch.device("cpu")
CHAIN = Strategy("ngram", 4, 1, 4)


def whole_drafts(max_slots: int = 1, max_tokens: int = 10**6) -> NgramDrafter:
    """However unlikely they are to be accepted."""
    return NgramDrafter(max_slots, max_tokens)


def request(name: str = "p", index: int = 0, prompt: Sequence[int] = (1, 2)) -> Request:
    return Request(name, index, tuple(prompt), SamplingParams())


def rollout_of(asked: Request, tokens: Sequence[int]) -> Rollout:
    response = tuple(tokens[len(asked.prompt_ids) :])
    return Rollout(
        asked.problem_id, asked.sample_index, asked.prompt_ids, response, (0.0,) * len(response), "stop", 0
    )


def propose_whole(
    drafter: NgramDrafter, rows: Sequence[Sequence[int]], strategy: Strategy, noise: float = 0.0
) -> NgramProposal:
    requests = [request(f"p{i}") for i in range(len(rows))]
    context = DraftContext(rows, requests, BatchParams.of([r.params for r in requests]), CPU)
    return drafter.propose(context, strategy, Given(torch.full((len(rows), strategy.depth + 1, 99), noise)))


def propose(*args: Any) -> DraftTree:
    return propose_whole(*args).tree


def verdict(said: Sequence[int], num_accepted: int | None = None) -> Verdict:
    accepted = len(said) - 1 if num_accepted is None else num_accepted
    return Verdict(tuple(said), accepted, tuple(range(accepted + 1)), (0.0,) * len(said))


def test_siblings_are_read_while_they_run_and_other_problems_never() -> None:
    drafter = whole_drafts(3)
    for slot, name in enumerate(("a", "a", "b")):
        drafter.admit(slot, request(name, slot))
    leader, cursor = [1, 2, 5, 6, 7, 8, 9, 10], [1, 2, 4, 5, 6, 7, 8]
    tree = propose(drafter, [leader, cursor, cursor], CHAIN)
    assert tree.tokens_BN[1].tolist()[1:3] == [9, 10]
    assert tree.tokens_BN[2].tolist()[1:3] == [0, 0], "filling: nothing was found"


def test_a_response_of_an_earlier_epoch_is_remembered_until_the_memory_is_full() -> None:
    drafter = whole_drafts(2, max_tokens=60)
    first = [1, 2, *range(10, 40)]
    asked = request("old")
    drafter.admit(0, asked)
    drafter.finish(0, rollout_of(asked, first))
    drafter.admit(0, request("old", 1))
    assert propose(drafter, [[1, 2, 10, 11, 12, 13]], CHAIN).tokens_BN.tolist() == [[13, 14, 15, 16, 17]]
    drafter.finish(0, rollout_of(request("old", 1), [1, 2, 3]))
    for name in ("x", "y"):
        drafter.admit(0, request(name))
        drafter.finish(0, rollout_of(request(name), [1, 2, *range(50, 80)]))
    assert drafter.num_tokens <= 60
    assert list(drafter.problems) == ["y"], "the least recently asked left first"


def test_a_text_that_still_grows_is_never_forgotten_however_many_samples_a_prompt_has() -> None:
    drafter = whole_drafts(100)
    rows = [[1, 2, *range(10 * i, 10 * i + 8)] for i in range(100)]
    for slot in range(100):
        drafter.admit(slot, request("p", slot))
    for slot in range(99, 49, -1):
        drafter.finish(slot, rollout_of(request("p", slot), rows[slot]))
    propose(drafter, rows[:50], CHAIN)
    for slot in range(49, -1, -1):
        drafter.finish(slot, rollout_of(request("p", slot), rows[slot]))
    assert len(drafter.problems["p"].texts) == suffix_index._MAX_TEXTS


def test_what_is_kept_of_texts_leaves_with_them() -> None:
    """Samples of one prompt come and go. The counted tokens bound what is kept: forgotten texts leave
    nothing to grow by."""
    rng, index = random.Random(0), SuffixIndex()
    with patch.object(suffix_index, "_MAX_TEXTS", 4):
        for number in range(200):
            text = index.open()
            index.extend(text, [rng.randrange(50) for _ in range(94)] + [100 + number] * 6)
            index.close(text)
    assert index.num_tokens == 4 * 100
    assert index.sources([100] * 6) == [], "a forgotten text leads nowhere"
    assert len(index.sources([299] * 6)) == 2
    assert index._earlier.keys() == index._skips.keys() == index.texts.keys()
    for known in index._tables:
        assert len(known.table) <= 8 * index.num_tokens


PROMPT = (1, 2, *range(20, 50))


def finds_the_prompt(drafter: NgramDrafter, name: str = "p", prompt: tuple[int, ...] = PROMPT) -> bool:
    """Whether a new sample that quotes its prompt is continued as the prompt was."""
    slot = drafter.slots.index(None)
    drafter.admit(slot, request(name, 0, prompt))
    found, _ = drafter._continuations(slot, [*prompt, 7, *prompt[2:6]], CHAIN)
    drafter.withdraw(slot)
    return [token for token, _ in continuations.grow(found, CHAIN)] == [*prompt[6:10]]


def say(drafter: NgramDrafter, *tokens: int, prompt: tuple[int, ...] = PROMPT) -> None:
    slot = drafter.slots.index(None)
    drafter.admit(slot, request("p", 0, prompt))
    drafter.finish(slot, rollout_of(request("p", 0, prompt), [*prompt, *tokens]))


OTHER = tuple(range(60, 90))


def two_prompts_in_turn(drafter: NgramDrafter) -> None:
    for number in range(40):
        say(drafter, 7, 8, number, prompt=(OTHER, PROMPT)[number % 2])


def first_sample_forgotten_while_the_second_runs(drafter: NgramDrafter) -> None:
    drafter.admit(0, request("p", 0, PROMPT))
    drafter.admit(1, request("p", 1, PROMPT))
    drafter.withdraw(0)
    for number in range(100):
        say(drafter, 7, number, prompt=OTHER)


def first_sample_never_asked(drafter: NgramDrafter) -> None:
    drafter.admit(0, request("p", 0, PROMPT))


@pytest.mark.parametrize(
    "before",
    [
        lambda drafter: say(drafter, 7, 8, prompt=OTHER),
        two_prompts_in_turn,
        first_sample_forgotten_while_the_second_runs,
        first_sample_never_asked,
        *(
            lambda drafter, num=num: [say(drafter, 7, n) for n in range(num)]
            for num in (63, 64, 65, 130, 200)
        ),
    ],
)
@pytest.mark.parametrize("is_restored", [False, True])
def test_what_a_prompt_says_is_found_whatever_was_said_to_its_problem_id_before(
    before: Callable[[NgramDrafter], None], is_restored: bool
) -> None:
    drafter = whole_drafts(4)
    before(drafter)
    if is_restored:
        counters = drafter.counters()
        drafter = whole_drafts(4)
        drafter.restore([counters, counters])
    assert finds_the_prompt(drafter)
    assert finds_the_prompt(drafter, prompt=OTHER)
    assert finds_the_prompt(drafter, "another")


def test_a_prompt_is_indexed_once_however_many_samples_it_has() -> None:
    drafter = whole_drafts(4)
    for number in range(150):
        say(drafter, 7, number, 8)
    drafter.admit(0, request("p", 0, PROMPT))
    index, _ = drafter._text(0)
    assert len(index.sources([9, *PROMPT[2:12]])) == 1
    assert index._prompts.keys() == index._skips.keys() == index.texts.keys()


def test_nothing_is_indexed_while_no_strategy_asks_for_retrieval() -> None:
    engine = make_engine(make_policy(), FixedTuner(Strategy.OFF), drafter="ngram")
    asked = [Request("p", i, (3, 4, 5, 6, 7), SamplingParams(max_tokens=20)) for i in range(4)]
    with patch.object(suffix_index.AnchorTable, "read", side_effect=AssertionError("indexed")):
        assert len(by_id(engine.generate(asked))) == 4


def test_what_was_indexed_at_once_is_found_as_what_was_indexed_step_by_step() -> None:
    rng = random.Random(4)
    texts = [[rng.randrange(3) for _ in range(60)] for _ in range(6)]
    found = []
    for looks in (True, False):
        index = SuffixIndex()
        opened = [index.open_sample(tuple(texts[0][:12])) for _ in texts]
        texts = [[*texts[0][:12], *text[12:]] for text in texts]
        for end in range(13, 61, 3):
            for text, tokens in zip(opened, texts, strict=True):
                index.extend(text, tokens[:end])
                if looks:
                    index.sources(tokens[:end])
        found.append([index.sources(text[:end]) for text in texts for end in range(4, 61)])
    assert found[0] == found[1]
    assert any(found[0])


def test_the_second_call_of_an_engine_retrieves_from_its_prompts_as_the_first() -> None:
    """The API numbers the prompts of each call anew."""
    drafted = []
    engine = make_engine(make_policy(), FixedTuner(CHAIN), drafter="ngram")
    for first in (1, 21, 41):
        engine.stats = EngineStats()
        prompts = [(*range(first, first + 18), *range(first + shift, first + 9)) for shift in range(3)]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        by_id(engine.generate([Request(str(n), 0, prompt, params) for n, prompt in enumerate(prompts)]))
        drafted.append(engine.stats.num_drafted_tokens)
    assert drafted[0] > 0
    assert drafted == [drafted[0]] * 3


def test_an_aborted_rollout_leaves_no_text_open() -> None:
    """A text that stays open is never forgotten."""
    engine = make_engine(make_policy(), FixedTuner(CHAIN), drafter="ngram")
    assert isinstance(engine.drafter, NgramDrafter)
    with patch.object(suffix_index, "_MAX_TEXTS", 2):
        for _ in range(5):
            engine.add(Request("p", i, (3, 4, 5), SamplingParams(max_tokens=40)) for i in range(4))
            for _ in range(4):
                engine.step()
            engine.abort()
            assert engine.drafter.slots == [None] * len(engine.drafter.slots)
    assert len(engine.drafter.problems["p"].texts) == 2


def test_candidates_are_ranked_by_their_share_and_the_laws_noise() -> None:
    once = [5, 6, 7, 8]
    tokens = [1, 2, *[*once, 30] * 2, *once, 40, 41, *once]  # 30 followed twice, 40 once
    noise = torch.zeros(1, 5, 99)
    for favoured, value, expected in ((40, 0.0, 30), (40, 20.0, 40), (30, 20.0, 30)):
        drafter = whole_drafts(1)
        drafter.admit(0, request("p0"))
        noise.zero_()
        noise[0, 0, favoured] = value
        context = DraftContext([tokens], [request("p0")], BatchParams.of([SamplingParams()]), CPU)
        assert drafter.propose(context, CHAIN, Given(noise)).tree.tokens_BN[0, 1] == expected


def test_confidence_in_a_match_is_learned_from_what_became_of_it() -> None:
    drafter = NgramDrafter(1)
    drafter.admit(0, request("p0"))
    tokens = [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8]
    expected = []
    for said in ((9, 10, 11, 12, 99), (98,)):  # all of the draft and one more, none of it
        for _ in range(300):
            drafter.observe(propose_whole(drafter, [tokens], CHAIN), [verdict(said)])
        proposal = propose_whole(drafter, [tokens], CHAIN)
        expected.append(sum(drafter.survival(proposal.retrieved[0], 4)))
    assert expected[0] > 3.9
    assert expected[1] < 0.5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_retrieval_learns_from_texts_that_another_drafter_went_on_with(seed: int) -> None:
    """Whatever was drafted: it is held against what the target said, up to where that is known."""
    rng = random.Random(seed)
    tokens = [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8]
    drafter = NgramDrafter(1)
    drafter.admit(0, request("p0"))
    said = tuple(token if rng.random() < 0.8 else 0 for token in (9, 10, 11, 12, 5)[: rng.randint(1, 5)])
    context = DraftContext([tokens], [request("p0")], BatchParams.of([SamplingParams()]), CPU)
    found = drafter.propose(context, CHAIN, torch.zeros(1, 5, 99))
    before = list(drafter.hits[1])
    drafter.observe(found, [verdict(said, num_accepted=0)])
    agreed = next(
        (i for i, (a, b) in enumerate(zip(said, (9, 10, 11, 12), strict=False)) if a != b), min(len(said), 4)
    )
    has_failed = agreed < min(len(said), 4)
    keep = ngram._KEEP
    assert drafter.hits[1] == [keep * before[0] + agreed, keep * before[1] + agreed + has_failed]


def test_the_hybrid_takes_up_retrieval_although_the_learned_drafter_was_better_at_first() -> None:
    """What was retrieved is judged whether or not it was drafted; otherwise it could never show what it is
    worth."""
    engine = make_engine(make_policy(std=0.05), FixedTuner(Strategy("hybrid", 6, 1, 6)))
    assert isinstance(engine.drafter, HybridDrafter)
    engine.drafter.learned_accepted = 2.5  # more than retrieval promises before it was ever judged
    taken = []
    choose = engine.drafter.propose

    def propose(context: DraftContext, strategy: Strategy, noise: DraftNoise) -> HybridProposal:
        proposal = choose(context, strategy, noise)
        taken.append(any(proposal.is_retrieved))
        return proposal

    engine.drafter.propose = propose
    params = SamplingParams(temperature=0.0, max_tokens=120)  # a random model runs in circles
    for _ in engine.generate([Request("p", 0, (3, 4, 5), params)]):
        pass
    assert not taken[0]
    assert any(taken)


def test_a_retrieved_chain_is_as_long_as_what_was_found_for_its_row() -> None:
    repeats, fresh = [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8], [1, 2, 3]
    drafter = NgramDrafter(2)
    for rows, lengths in (([repeats], None), ([repeats, fresh], (5, 1)), ([fresh, fresh], None)):
        for slot in range(len(rows)):
            drafter.admit(slot, request(f"p{slot}"))
        tree = propose(drafter, rows, CHAIN)
        assert tree.num_nodes == (5 if repeats in rows else 1)
        assert tree.lengths == lengths


def test_a_text_leads_down_a_retrieved_tree_as_far_as_it_agrees() -> None:
    nodes = [(10, 0), (11, 0), (12, 1), (13, 2), (14, 4)]  # 10 - 12, 11 - 13 - 14
    for said, expected in (
        ((10, 12, 99), (2, False)),  # beyond a leaf nothing was retrieved
        ((11, 13, 14), (3, False)),
        ((11, 13, 99), (2, True)),
        ((11, 12), (1, True)),
        ((11,), (1, False)),
        ((99, 11), (0, True)),
    ):
        assert continuations.walk(nodes, said) == expected
    assert continuations.Retrieved(1, nodes).depth == 3


@pytest.mark.parametrize("width", [1, 2])
def test_rows_of_a_hybrid_batch_draft_each_in_their_own_way(width: int) -> None:
    """A row that repeats itself beside one that does not."""
    engine = make_engine(make_policy(), FixedTuner(Strategy("hybrid", 4, width, 8)))
    hybrid = engine.drafter
    assert isinstance(hybrid, HybridDrafter)
    hybrid.ngram.hits = [[98.0, 100.0]] * len(hybrid.ngram.hits)
    retrieve, choose = hybrid.ngram.propose, hybrid.propose
    retrieved: list[DraftTree] = []
    mixed: list[tuple[DraftTree, int, DraftTree]] = []

    def keep(*args: Any) -> NgramProposal:
        proposal = retrieve(*args)
        retrieved.append(proposal.tree)
        return proposal

    def propose(*args: Any) -> HybridProposal:
        proposal = choose(*args)
        if len(set(proposal.is_retrieved)) == 2:
            mixed.append((proposal.tree, proposal.is_retrieved.index(True), retrieved[-1]))
        return proposal

    hybrid.ngram.propose, hybrid.propose = keep, propose
    params = SamplingParams(temperature=1.0, max_tokens=60)
    prompts = [(3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7), (30, 31, 32, 33, 34)]
    for _ in engine.generate([Request(str(i), 0, prompt, params) for i, prompt in enumerate(prompts)]):
        pass
    assert mixed
    for tree, row, found in mixed:
        lengths = tree.lengths or (tree.num_nodes,) * 2
        common = min(lengths[row], found.num_nodes)
        assert tree.tokens_BN[row, :common].tolist() == found.tokens_BN[row, :common].tolist()
        assert tree.is_chain == (width == 1)
        if width == 1:
            assert lengths[row] == found.num_nodes
            assert lengths[1 - row] == 5


def longest_matches(texts: dict[int, list[int]], ending: list[int]) -> list[tuple[int, int, int]]:
    """`SuffixIndex.sources` by comparing everything with everything; the texts have been read one after
    the other."""
    for anchor in ANCHORS:
        found = []
        for text, tokens in reversed(texts.items()):
            for end in range(len(tokens) - 1, anchor - 1, -1):
                length = 0
                while (
                    length < min(end, len(ending), suffix_index.MAX_MATCH)
                    and tokens[end - 1 - length] == ending[-1 - length]
                ):
                    length += 1
                if length >= anchor:
                    found.append((length, text, end))
        if found:
            return found[: suffix_index._MAX_SOURCES]
    return []


def test_the_index_finds_what_comparing_everything_finds() -> None:
    rng, index = random.Random(5), SuffixIndex()
    texts: dict[int, list[int]] = {}
    num_found = 0
    for _ in range(6):
        text = index.open()
        texts[text] = []
        while len(texts[text]) < 400:
            texts[text] += [rng.choice((1, 2, 150_000)) for _ in range(rng.randint(1, 7))] + [3] * rng.choice(
                (0, 0, 60)
            )
            index.extend(text, texts[text])
            expected = longest_matches(texts, texts[text])
            assert index.sources(texts[text]) == expected
            num_found += len(expected)
    assert num_found > 300


def grown_by_tokens(
    followed: list[tuple[tuple[int, ...], float]], strategy: Strategy
) -> list[tuple[int, int]]:
    """`grow` over a trie with a node for every token, and the confidence of each recomputed from the root
    on."""
    weights: dict[tuple[int, ...], float] = {}
    for tokens, weight in followed:
        for end in range(1, len(tokens) + 1):
            weights[tokens[:end]] = weights.get(tokens[:end], 0.0) + weight
    nodes: list[tuple[int, int]] = []
    columns: dict[tuple[int, ...], int] = {(): 0}
    open_nodes: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...], confidence: float) -> None:
        siblings = [p for p in weights if p[:-1] == path and len(p) <= strategy.depth]
        total = sum(weights[p] ** (1 / continuations._TAU) for p in siblings)
        ranked = sorted(siblings, key=lambda p: -weights[p])[: strategy.width]
        for p in ranked:
            open_nodes.append(
                (confidence * weights[p] ** (1 / continuations._TAU) / total, -len(open_nodes), p)
            )

    offer((), 1.0)
    taken: set[tuple[int, ...]] = set()
    while len(nodes) < strategy.budget and (left := [n for n in open_nodes if n[2] not in taken]):
        confidence, _, path = max(left, key=lambda n: (round(n[0], 12), n[1]))
        taken.add(path)
        nodes.append((path[-1], columns[path[:-1]]))
        columns[path] = len(nodes)
        offer(path, confidence)
    return nodes


@pytest.mark.parametrize("shape", ["5x1x5", "4x2x7", "6x3x20"])
def test_branches_grow_the_tree_that_single_tokens_grow(shape: str) -> None:
    rng = random.Random(7)
    for _ in range(60):
        found = {
            tuple(rng.randrange(3) for _ in range(rng.randint(0, 6))): float(rng.randint(4, 48) ** 2)
            for _ in range(rng.randint(1, 8))
        }
        strategy = Strategy.parse(f"ngram:{shape}")
        grown = continuations.grow(continuations.branch_out([*found.items()]), strategy)
        assert grown == grown_by_tokens([*found.items()], strategy)


def test_the_hybrid_learns_what_the_learned_drafter_brings_from_its_own_rows_alone() -> None:
    hybrid = make_engine(make_policy(), FixedTuner(Strategy("hybrid", 4, 1, 4))).drafter
    assert isinstance(hybrid, HybridDrafter)
    tree = DraftTree(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64))
    verdicts = [verdict((1, 2, 3, 4, 5), num) for num in (4, 0, 2)]
    with patch.object(hybrid.learned, "observe"):
        hybrid.observe(HybridProposal(tree, (True, False, False), LearnedProposal(tree)), verdicts)
        keep = 0.99**2
        assert hybrid.learned_accepted == pytest.approx(keep * 1.0 + (1 - keep) * (0 + 2) / 2)
        known = hybrid.learned_accepted
        hybrid.observe(HybridProposal(tree, (True, True, True), LearnedProposal(tree)), verdicts)
        assert hybrid.learned_accepted == known, "all rows were retrieved"
