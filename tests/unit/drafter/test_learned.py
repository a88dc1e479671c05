"""The learned drafter at work: its cache and its memory of features against forwards without either (FIELD
§2, 1 to 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lossless.helpers import CONFIG, VOCAB, Given, Switching, use_references
from tests.unit.drafter.parts import (
    POLICY,
    SIZE,
    TARGET,
    context_of,
    features_of,
    make_drafter,
    make_request,
    make_requests,
    plain_forward,
    randn,
    random_tokens,
    remember,
    run_engine,
)
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Request, SamplingParams
from tlt.drafter.drafting.learned import pair_cache
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.drafting.retrieval.references import References
from tlt.engine.own.engine import RolloutEngine
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner


def recorded_forward(drafter: LearnedDrafter) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """From here on, (embeddings, features, positions, output) of every forward of the drafter's model."""
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    original = drafter.model.forward

    def forward(embeddings: Tensor, features: Tensor, positions: Tensor, attend: Any) -> Tensor:
        output = original(embeddings, features, positions, attend)
        calls.append((embeddings.clone(), features.clone(), positions.clone(), output.clone()))
        return output

    drafter.model.forward = forward
    return calls


@pytest.mark.parametrize("strategy", [Strategy("learned", 4, 1, 4), Strategy("learned", 3, 3, 9)], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_ragged_batch_drafts_what_each_sequence_drafts_alone(
    strategy: Strategy, data: st.DataObject
) -> None:
    batch, stages = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    growth = [[data.draw(st.integers(1 + (stage == 0), 9)) for _ in range(batch)] for stage in range(stages)]
    rows = [random_tokens(sum(stage[b] for stage in growth), b) for b in range(batch)]
    features = [randn(len(row), SIZE, seed=b) for b, row in enumerate(rows)]
    params = [SamplingParams(temperature=t) for t in (1.0, 0.6, 0.0, 1.4)][:batch]
    noise = randn(batch, strategy.depth + 1, VOCAB, seed=9).float()
    together, alone = make_drafter(), [make_drafter(1) for _ in rows]
    for b, row in enumerate(rows):
        together.admit(b, make_request(row[:1]))
        alone[b].admit(0, make_request(row[:1]))
    for stage in range(stages):
        lengths = [sum(growth[s][b] for s in range(stage + 1)) for b in range(batch)]
        for b, length in enumerate(lengths):
            remember(together, b, features[b][: length - 1])
            remember(alone[b], 0, features[b][: length - 1])
        found = together.propose(
            context_of([row[:n] for row, n in zip(rows, lengths, strict=True)], params),
            strategy,
            Given(noise),
        ).tree
        for b, length in enumerate(lengths):
            expected = (
                alone[b]
                .propose(context_of([rows[b][:length]], params[b : b + 1]), strategy, Given(noise[b : b + 1]))
                .tree
            )
            assert found.tokens_BN[b].tolist() == expected.tokens_BN[0].tolist()
            assert found.parents_BN[b].tolist() == expected.parents_BN[0].tolist()


@pytest.mark.parametrize(
    ("tuner", "oracle"),
    [
        (FixedTuner(Strategy("learned", 3, 1, 3)), False),
        (FixedTuner(Strategy("learned", 3, 2, 6)), False),
        (FixedTuner(Strategy("artificial", 4, 3, 10)), True),
        (Switching([Strategy.OFF, Strategy("learned", 3, 1, 3), Strategy("learned", 3, 2, 6)], 1), False),
    ],
    ids=["chain", "tree", "oracle trees", "switching"],
)
def test_features_remembered_through_rejections_are_those_of_a_plain_forward(
    tuner: StrategyTuner, oracle: bool
) -> None:
    requests = make_requests()
    engine, ended = run_engine(tuner, requests, oracle)
    assert len(ended) == len(requests)
    for finished in ended:
        tokens = finished.rollout.prompt_ids + finished.rollout.token_ids
        assert finished.captured_TF is not None
        assert len(finished.captured_TF) == len(tokens) - 1
        torch.testing.assert_close(finished.captured_TF, features_of(POLICY, tokens[:-1]), rtol=0, atol=1e-9)
    assert 0 < engine.stats.survivors_by_depth[1] < engine.stats.num_drafts, "some accepted, some rejected"


@pytest.mark.parametrize("num_right", [150, 41, 33, 32])
def test_features_after_a_long_accepted_reference_are_those_of_a_plain_forward(num_right: int) -> None:
    """A reference of 150 tokens, right up to some: beyond the first 33 nodes only what was kept is
    remembered."""
    asked = Request("p", 0, (3, 4, 5), SamplingParams(temperature=0.7, max_tokens=150))
    right = run_engine(FixedTuner(Strategy.OFF), [asked])[1][0].rollout.token_ids
    references = References()
    wrong = [(token + 1) % VOCAB for token in right[num_right:]]
    references.keep(asked.noise_key, [*right[:num_right], *wrong])
    engine = RolloutEngine(
        PackedTransformer(CONFIG, torch.float64),
        max_batch_size=3,
        tuner=FixedTuner(Strategy("ahead", 128, 1, 128)),
    )
    engine.load_policy(dict(POLICY.named_parameters()))
    engine.load_drafter(make_drafter(3, engine.target))
    use_references(engine, references, 3)
    engine.add([asked])
    ended: list[Finished] = []
    while not engine.is_idle:
        ended += engine.step(captures=True)
    (finished,) = ended
    assert finished.rollout.token_ids == right
    assert engine.stats.accept_length is not None
    assert engine.stats.accept_length > (20 if num_right == 150 else 1)
    tokens = finished.rollout.prompt_ids + right
    assert finished.captured_TF is not None
    torch.testing.assert_close(finished.captured_TF, features_of(POLICY, tokens[:-1]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "stages", [range(2, 40), [2, 5, 6, 17, 39], [39]], ids=["token by token", "in chunks", "all at once"]
)
@pytest.mark.parametrize("limit", [256, 4])
def test_the_cached_drafter_equals_the_uncached_training_forward(stages: Sequence[int], limit: int) -> None:
    """Committed token by token, by speculation, or in one piece after a stretch of OFF; then a chain on
    top."""
    tokens = [random_tokens(40, 1), random_tokens(40, 2)]
    features = [randn(40, SIZE, seed=3), randn(40, SIZE, seed=4)]
    drafter = make_drafter()
    calls = recorded_forward(drafter)
    for slot in range(2):
        drafter.admit(slot, make_request(tokens[slot][:2]))
    with patch.object(pair_cache, "_CATCH_UP_TOKENS", limit):
        for stage, length in enumerate(stages):
            lengths = [length, max(2, length - 3 * (stage % 2))] if stage else [length, length]
            rows = [tokens[b][:n] for b, n in enumerate(lengths)]
            if any(n - 1 <= done for n, done in zip(lengths, drafter.draft_cache.counts, strict=False)):
                rows = [tokens[b][:length] for b in range(2)]
            for slot, row in enumerate(rows):
                remember(drafter, slot, features[slot][: len(row) - 1])
            calls.clear()
            noise = randn(2, 4, VOCAB, seed=length).float()
            tree = drafter.propose(context_of(rows), Strategy("learned", 3, 1, 3), Given(noise)).tree
            for slot, row in enumerate(rows):
                embeddings, inputs = TARGET.embed(torch.tensor(row[1:])), features[slot][: len(row) - 1]
                drafted = tree.tokens_BN[slot, 1:].tolist()
                for level in range(3):
                    output = plain_forward(embeddings, inputs)[-1]
                    score = TARGET.logits(output) / drafter.tau + noise[slot, level]
                    assert drafted[level] == int(score.argmax())
                    if level < 2:
                        produced = calls[level - 2][3].view(2, -1, SIZE)[slot]
                        embeddings = torch.cat(
                            [embeddings, TARGET.embed(torch.tensor(drafted[level : level + 1]))]
                        )
                        inputs = torch.cat([inputs, output[None]])
                        torch.testing.assert_close(
                            produced[-1], plain_forward(embeddings, inputs)[-1], rtol=0, atol=1e-9
                        )


def test_a_long_prompt_that_joins_a_long_response_is_caught_up_within_the_cache() -> None:
    """One row is up to date, the other misses many chunks: the first row's rubbish must stay inside its
    reservation."""
    drafter = make_drafter()
    old, new = random_tokens(122, 1), random_tokens(100, 2)
    features = [randn(122, SIZE, seed=3), randn(100, SIZE, seed=4)]
    strategy = Strategy("learned", 1, 1, 1)
    with patch.object(pair_cache, "_CATCH_UP_TOKENS", 4):
        drafter.admit(0, make_request(old))
        remember(drafter, 0, features[0][:120])
        drafter.propose(context_of([old[:121]]), strategy, Given(randn(1, 2, VOCAB)))
        drafter.admit(1, make_request(new))
        remember(drafter, 0, features[0][:121])
        remember(drafter, 1, features[1][:99])
        noise = randn(2, 2, VOCAB).float()
        tree = drafter.propose(context_of([old, new]), strategy, Given(noise)).tree
    for slot, row in enumerate((old, new)):
        output = plain_forward(TARGET.embed(torch.tensor(row[1:])), features[slot][: len(row) - 1])[-1]
        assert tree.tokens_BN[slot, 1] == (TARGET.logits(output) / drafter.tau + noise[slot, 0]).argmax()


def test_a_catch_up_of_a_large_batch_reads_a_bounded_number_of_pairs_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, lengths = 12, [3, 50, 4, 49, 34, 33, 32, 7, 50, 20, 3, 41]
    rows = [random_tokens(n, seed) for seed, n in enumerate(lengths)]
    features = [randn(n, SIZE, seed=100 + seed) for seed, n in enumerate(lengths)]
    noise = randn(batch, 2, VOCAB).float()

    def drafted(most: int) -> tuple[Tensor, int]:
        monkeypatch.setattr(pair_cache, "PREFILL_TOKENS", most)
        drafter = make_drafter(batch)
        for slot, row in enumerate(rows):
            drafter.admit(slot, make_request(row[:2]))
            remember(drafter, slot, features[slot][:1])
        strategy = Strategy("learned", 1, 1, 1)
        drafter.propose(context_of([row[:2] for row in rows]), strategy, Given(noise))
        for slot, row in enumerate(rows):
            remember(drafter, slot, features[slot][: len(row) - 1])
        calls = recorded_forward(drafter)
        tree = drafter.propose(context_of(rows), strategy, Given(noise)).tree
        return tree.tokens_BN, max(len(output) for _, _, _, output in calls)

    (at_once, many), (in_parts, few) = drafted(8192), drafted(60)
    assert torch.equal(at_once, in_parts)
    assert many > 60 >= few


def reference_tree(
    tokens: list[int], features: Tensor, strategy: Strategy, noise: Tensor, tau: float
) -> set[tuple[int, ...]]:
    """EAGLE-2's growth by brute force: every node's state by an uncached forward over its whole line.
    Returns the drafted nodes as paths of tokens from the root."""

    def states(path: tuple[int, ...]) -> Tensor:
        embeddings, inputs = TARGET.embed(torch.tensor(tokens[1:])), features[: len(tokens) - 1]
        for token in path:
            state = plain_forward(embeddings, inputs)[-1:]
            embeddings, inputs = (
                torch.cat([embeddings, TARGET.embed(torch.tensor([token]))]),
                torch.cat([inputs, state]),
            )
        return plain_forward(embeddings, inputs)[-1]

    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for level in range(strategy.depth):
        found = []
        for confidence, path in frontier:
            logprobs = (TARGET.logits(states(path)) / tau + noise[level]).log_softmax(-1)
            for token in logprobs.topk(strategy.width).indices.tolist():
                found.append((confidence + min(float(logprobs[token]), -1e-4), (*path, token)))
        pool += found
        frontier = sorted(found, reverse=True)[: strategy.width]
    return {path for _, path in sorted(pool, reverse=True)[: strategy.budget]}


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 2, 6), (4, 3, 7), (5, 2, 12)])
def test_trees_are_those_of_a_brute_force_growth_without_a_cache(shape: tuple[int, int, int]) -> None:
    strategy = Strategy("learned", *shape)
    rows = [random_tokens(7, 1), random_tokens(12, 2), random_tokens(3, 3)]
    features = [randn(len(row), SIZE, seed=b) for b, row in enumerate(rows)]
    noise = randn(3, strategy.depth + 1, VOCAB, seed=6).float()
    drafter = make_drafter()
    for slot, row in enumerate(rows):
        drafter.admit(slot, make_request(row))
        remember(drafter, slot, features[slot][: len(row) - 1])
    tree = drafter.propose(context_of(rows), strategy, Given(noise)).tree
    for slot, row in enumerate(rows):
        tokens, parents = tree.tokens_BN[slot].tolist(), tree.parents_BN[slot].tolist()
        assert (tokens[0], parents[0]) == (row[-1], -1)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        assert (
            len(set(paths)) == len(paths) == strategy.budget + 1
            or strategy.budget > strategy.width * strategy.depth
        )
        assert set(paths[1:]) == reference_tree(row, features[slot], strategy, noise[slot], drafter.tau)
