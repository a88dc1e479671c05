"""The faults that drafters and their trainers are known to have (FIELD §2), each as an equality that would break.

The numbers in the headings are those of that list. Everything is float64 unless a test says otherwise.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lossless.helpers import CONFIG, STOP, VOCAB, ArtificialDrafter, Switching, make_policy
from tlt.drafter import learned as drafters_module
from tlt.drafter.buffer import TOKEN_ID_BYTES, PackedBatch, TrajectoryBuffer
from tlt.drafter.calibration import Calibration
from tlt.drafter.folder import load_drafter, save_drafter
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.losses import PRESETS, Preset, draft_loss
from tlt.drafter.model import DraftModel, Method, PackedDrafter, align, drafter_config
from tlt.drafter.spot import MICRO_STEP_SHARE, MIN_TOKENS, FeatureRecompute, MicroStepSize, SpotTrainer
from tlt.drafter.trainer import DrafterTrainer
from tlt.engine.engine import RolloutEngine
from tlt.models.attention import PackedCausal, Unrolled
from tlt.models.decoder import Transformer
from tlt.models.hf_weights import content_hash
from tlt.models.packed import PackedTransformer
from tlt.speculative.protocol import DraftContext
from tlt.speculative.sampling import BatchParams
from tlt.tuning.tuner import Fixed
from tlt.types import (
    DrafterReport,
    DraftTree,
    Request,
    Rollout,
    SamplingParams,
    Span,
    Strategy,
    StrategyTuner,
    UserError,
    Verdict,
)

SIZE = CONFIG.hidden_size
POLICY = make_policy()
TARGET = PackedTransformer.from_module(POLICY, torch.float64)


def make_model(seed: int = 2, scale: float = 8.0, method: Method = "eagle", draft_vocab: int | None = None) -> DraftModel:
    """A random drafter, its attention and mlp strong enough to matter."""
    model = DraftModel(drafter_config(CONFIG, method, draft_vocab)).double().initialize(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name != "fc.weight":
                parameter.mul_(scale)
    return model


MODEL = make_model()
HASS = PRESETS["hass"]
ONE_STEP = Preset("uneven", "eagle", 1, 1.0, 0.7, 1.3)


def make_drafter(
    max_slots: int = 4, target: PackedTransformer = TARGET, tau: float = 0.7, window: int = 4096, threshold: float = 0.0
) -> LearnedDrafter:
    packed = PackedDrafter.from_tensors(MODEL.config, MODEL.state_dict(), torch.float64)
    return LearnedDrafter(packed, target, max_slots, tau=tau, window=window, confidence_threshold=threshold, calibrate=False)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@torch.no_grad()
def features_of(policy: Transformer, tokens: Sequence[int]) -> Tensor:
    """A plain forward of the trainable target over the tokens."""
    attend = PackedCausal(CONFIG, [len(tokens)])
    return policy(torch.tensor(tokens), attend.positions(), attend)


@torch.no_grad()
def plain_forward(embeddings: Tensor, features: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """The trainable drafter without a cache."""
    attend = PackedCausal(MODEL.config.layer, lengths or [len(embeddings)])
    return MODEL(embeddings, features, attend.positions(), attend)


def make_rollout(tokens: Sequence[int], num_prompt: int, name: str = "p", index: int = 0, version: int = 0) -> Rollout:
    response = tuple(tokens[num_prompt:])
    return Rollout(name, index, tuple(tokens[:num_prompt]), response, (0.0,) * len(response), "length", version)


def make_request(tokens: Sequence[int], name: str = "p", params: SamplingParams | None = None) -> Request:
    return Request(name, 0, tuple(tokens), params or SamplingParams())


def remember(drafter: LearnedDrafter, slot: int, features: Tensor, start: int = 0) -> None:
    drafter.remember([slot], [start], features[None, start:])


def context_of(rows: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None) -> DraftContext:
    params = params or [SamplingParams()] * len(rows)
    requests = [make_request(row[:2], f"p{i}", p) for i, (row, p) in enumerate(zip(rows, params, strict=True))]
    return DraftContext(rows, requests, BatchParams(params))


# ── 1. causality ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("changed", [0, 4, 10])
def test_the_training_forward_of_a_pair_depends_on_no_later_pair(changed: int) -> None:
    embeddings, features = randn(11, SIZE, seed=1), randn(11, SIZE, seed=2)
    before = plain_forward(embeddings, features)
    for inputs in (embeddings, features):
        inputs[changed:] += 1.0
        after = plain_forward(embeddings, features)
        torch.testing.assert_close(after[:changed], before[:changed], rtol=0, atol=1e-12)
        assert (after[changed:] - before[changed:]).abs().amax(-1).min() > 1e-6, "and on itself and all before"
        inputs[changed:] -= 1.0


def test_a_pair_that_drafts_on_in_training_sees_no_later_pair_but_the_token_it_reads() -> None:
    """Step s of pair t reads token t + 1 + s, and nothing beyond: neither a feature after t nor another pair's step."""
    lengths, changed, steps = (9, 7), 4, 3
    base, other = make_batch(lengths), make_batch(lengths)
    other.features_NE[changed:9] += 1.0
    before, after = (unroll(MODEL, batch, steps) for batch in (base, other))
    for s in range(steps):
        torch.testing.assert_close(after[s][:changed], before[s][:changed], rtol=0, atol=1e-12)
        assert (after[s][changed:8] - before[s][changed:8]).abs().amax(-1).min() > 1e-6, "what comes from it changes"
        torch.testing.assert_close(after[s][8:], before[s][8:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [Strategy("learned", 4, 1, 4), Strategy("learned", 3, 3, 9)], ids=str)
def test_drafts_depend_on_no_feature_beyond_the_committed_tokens(strategy: Strategy) -> None:
    rows, noise = [random_tokens(9, 1), random_tokens(6, 2)], randn(2, strategy.depth + 1, VOCAB).float()
    trees = []
    for future in (0.0, 50.0):
        drafter = make_drafter()
        for slot, row in enumerate(rows):
            drafter.admit(slot, make_request(row))
            known = randn(len(row) - 1, SIZE, seed=slot)
            remember(drafter, slot, torch.cat([known, torch.full((12, SIZE), future, dtype=torch.float64)]))
        trees.append(drafter.propose(context_of(rows), strategy, noise))
    assert torch.equal(trees[0].tokens_BN, trees[1].tokens_BN)
    assert torch.equal(trees[0].parents_BN, trees[1].parents_BN)


# ── 2. alignment ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6))
def test_the_pair_at_t_joins_feature_t_with_token_t_plus_1_and_predicts_its_feature(lengths: list[int]) -> None:
    """Tokens and features hold their own (sequence, position)."""
    code = torch.tensor([[sequence, position] for sequence, n in enumerate(lengths) for position in range(n)])
    pairs = align(lengths)
    expected = [(sequence, t) for sequence, n in enumerate(lengths) for t in range(n - 1)]
    assert [tuple(row) for row in code[pairs.feature_index_M].tolist()] == expected
    assert [tuple(row) for row in code[pairs.token_index_M].tolist()] == [(s, t + 1) for s, t in expected]
    assert [tuple(row) for row in code[pairs.token_index_M].tolist()] == [(s, t + 1) for s, t in expected]
    assert pairs.positions_M.tolist() == [t for _, t in expected]
    assert pairs.lengths == tuple(n - 1 for n in lengths)


def coded_buffer(shapes: Sequence[tuple[int, int]], seed: int) -> TrajectoryBuffer:
    """Trajectories of (tokens, prompt tokens); token t of trajectory s is 1000 s + t, and so is its feature."""
    buffer = TrajectoryBuffer(10**9, seed)
    for sequence, (length, num_prompt) in enumerate(shapes):
        codes = [1000 * sequence + t for t in range(length)]
        features = torch.tensor(codes[:-1], dtype=torch.float64)[:, None].expand(-1, 4)
        buffer.add(make_rollout(codes, num_prompt, index=sequence), features)
    return buffer


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_sampled_windows_are_aligned_at_any_offset(data: st.DataObject) -> None:
    shapes = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(3, 60))
        shapes.append((length, data.draw(st.integers(1, length - 1))))
    buffer = coded_buffer(shapes, data.draw(st.integers(0, 999)))
    budget = data.draw(st.integers(3, 80))
    for _ in range(4):
        batch = buffer.sample(budget)
        assert batch is not None
        assert sum(batch.lengths) == len(batch.token_ids_N) == len(batch.features_NE)
        assert sum(batch.lengths) <= budget + 2
        pairs = align(batch.lengths)
        tokens, features = batch.token_ids_N, batch.features_NE[:, 0].long()
        assert torch.equal(tokens[pairs.token_index_M], features[pairs.feature_index_M] + 1)
        assert torch.equal(features[pairs.token_index_M], tokens[pairs.token_index_M])
        sequence, t = features[pairs.feature_index_M] // 1000, features[pairs.feature_index_M] % 1000
        num_prompt = torch.tensor([prompt for _, prompt in shapes])[sequence]
        assert torch.equal(batch.weight_M, (t + 2 >= num_prompt).float()), "a pair counts if it predicts a response token"
        assert batch.weight_M.any()
        for window in features.split(batch.lengths):
            assert torch.equal(window, window[0] + torch.arange(len(window)))


def test_short_and_long_responses_are_trained_on_by_their_tokens() -> None:
    """Tokens 0 to 19 are the short response's, then the long one's; a long one is not drawn more often and taken whole."""
    buffer = TrajectoryBuffer(10**7, seed=3)
    for first, length in ((0, 20), (20, 61)):
        rollout = make_rollout(range(first, first + length), 1, name=str(first))
        buffer.add(rollout, randn(length - 1, SIZE))
    counts = torch.zeros(81)
    for _ in range(600):
        batch = buffer.sample(64)
        assert batch is not None
        counts += torch.bincount(batch.token_ids_N, minlength=81)
    assert counts[:19].mean() / counts[25:75].mean() == pytest.approx(1.0, abs=0.35)


def test_windows_lie_anywhere_in_a_trajectory() -> None:
    buffer = coded_buffer([(40, 2)], seed=3)
    starts = set()
    for _ in range(600):
        batch = buffer.sample(10)
        assert batch is not None
        starts.add(int(batch.features_NE[0, 0]))
    assert starts == set(range(30))


def test_a_window_shorter_than_the_prompt_still_holds_a_response_token() -> None:
    """Otherwise its loss would be 0 / 0."""
    buffer = coded_buffer([(60, 55)], seed=3)
    for _ in range(50):
        batch = buffer.sample(8)
        assert batch is not None
        assert batch.weight_M.any()


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


def token_of(embedding: Tensor) -> int:
    (index,) = (TARGET.embedding_VE == embedding).all(-1).nonzero().flatten().tolist()
    return int(index)


def test_catching_up_joins_every_feature_with_the_token_after_it() -> None:
    """Features hold their own (sequence, position). Rows of different lengths catch up twice: with all and with a few."""
    lengths, more = [9, 4, 12], [2, 5, 1]
    rows = [random_tokens(n + m, seed) for seed, (n, m) in enumerate(zip(lengths, more, strict=True))]
    drafter = make_drafter()
    calls = recorded_forward(drafter)
    code = [torch.zeros(len(row), SIZE, dtype=torch.float64) for row in rows]
    for sequence, features in enumerate(code):
        features[:, 0], features[:, 1] = sequence + 1, torch.arange(len(features))
        drafter.admit(sequence, make_request(rows[sequence]))
    done = [0, 0, 0]
    for known in (lengths, [n + m for n, m in zip(lengths, more, strict=True)]):
        for slot, features in enumerate(code):
            remember(drafter, slot, features[: known[slot] - 1])
        calls.clear()
        context = context_of([row[:n] for row, n in zip(rows, known, strict=True)])
        drafter.propose(context, Strategy("learned", 1, 1, 1), randn(3, 2, VOCAB))
        got = []
        for embeddings, features_NE, positions, _ in calls:
            for embedding, feature, position in zip(embeddings, features_NE, positions.tolist(), strict=True):
                sequence, t = int(feature[0]) - 1, int(feature[1])
                if sequence < 0 or t + 1 >= known[sequence]:
                    continue  # a shorter row's rubbish, checked below to be without effect
                assert (token_of(embedding), position) == (rows[sequence][t + 1], t)
                got.append((sequence, t))
        assert sorted(got) == [(s, t) for s in range(3) for t in range(done[s], known[s] - 1)], "each once"
        done = [n - 1 for n in known]


# ── 3. no padding shifts anything ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", [Strategy("learned", 4, 1, 4), Strategy("learned", 3, 3, 9)], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_ragged_batch_drafts_what_each_sequence_drafts_alone(strategy: Strategy, data: st.DataObject) -> None:
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
        found = together.propose(context_of([row[:n] for row, n in zip(rows, lengths, strict=True)], params), strategy, noise)
        for b, length in enumerate(lengths):
            expected = alone[b].propose(context_of([rows[b][:length]], params[b : b + 1]), strategy, noise[b : b + 1])
            assert found.tokens_BN[b].tolist() == expected.tokens_BN[0].tolist()
            assert found.parents_BN[b].tolist() == expected.parents_BN[0].tolist()


@pytest.mark.parametrize("unwanted", [(), (1,)], ids=["learned", "one row elsewhere"])
def test_a_chain_stops_where_its_own_sequence_is_no_longer_likely_to_accept_it(unwanted: tuple[int, ...]) -> None:
    """Against the chain of full depth: its confidences, from the scores it ranked by, say where to stop."""
    depth, rows = 6, [random_tokens(9, 1), random_tokens(12, 2), random_tokens(7, 3)]
    strategy, noise = Strategy("learned", depth, 1, depth), randn(3, depth + 1, VOCAB, seed=9).float()

    def propose(threshold: float) -> tuple[DraftTree, Tensor]:
        drafter = make_drafter(threshold=threshold)
        for slot, row in enumerate(rows):
            drafter.admit(slot, make_request(row[:1]))
            remember(drafter, slot, randn(len(row), SIZE, seed=slot)[: len(row) - 1])
        scores: list[Tensor] = []
        rank = drafter._scores

        def watched(*args: Any) -> Tensor:
            scores.append(rank(*args))
            return scores[-1]

        with patch.object(drafter, "_scores", watched):
            return drafter.propose(context_of(rows), strategy, noise, unwanted), torch.cat(scores, dim=1)

    whole, scores_BDV = propose(0.0)
    assert whole.num_nodes == depth + 1
    assert whole.lengths is None
    survival_BD = scores_BDV.log_softmax(-1).amax(-1).cumsum(1).exp()
    survival_BD[list(unwanted)] = 0.0
    for threshold in (f * p for f in (0.999, 1.001) for p in survival_BD.flatten().tolist() if p):
        stops = (survival_BD >= threshold).sum(1).tolist()
        lengths = [1 + max(stop, 1) for stop in stops]  # the first token is drafted in any case
        tree, scores = propose(threshold)
        assert tree.lengths == (tuple(lengths) if len(set(lengths)) > 1 else None)
        for row, length in enumerate(lengths):
            assert tree.tokens_BN[row, :length].tolist() == whole.tokens_BN[row, :length].tolist()
            assert tree.parents_BN[row].tolist() == [*range(-1, length - 1), *[-1] * (max(lengths) - length)]
        assert scores.shape[1] == min(max(stops) + 1, depth), "nothing is drafted beyond the last stop"


def test_a_chain_that_stopped_learns_from_the_targets_word_about_the_token_that_was_not_drafted() -> None:
    """Otherwise a confidence once too low would never be looked at again."""
    strategy, noise, tokens = Strategy("learned", 2, 1, 2), randn(1, 3, VOCAB, seed=9).float(), [random_tokens(9, 1)]

    def propose(threshold: float) -> tuple[LearnedDrafter, list[int]]:
        drafter = make_drafter(threshold=threshold)
        drafter.calibration = Calibration(torch.device("cpu"))
        drafter.admit(0, make_request(tokens[0][:1]))
        remember(drafter, 0, randn(9, SIZE, seed=0)[:8])
        drafted = drafter.propose(context_of(tokens), strategy, noise).tokens_BN[0, 1:].tolist()
        return drafter, drafted

    _, (first, second) = propose(1e-9)

    def stops_at_the_second(threshold: float) -> bool:
        drafter, drafted = propose(threshold)
        return drafted == [first] and drafter._cells_BN is not None and drafter._cells_BN.shape[1] == 2

    threshold = next(t for t in (0.9**k for k in range(100)) if stops_at_the_second(t))
    for said in ((first, second), (first, second + 1), (first + 1,)):
        drafter, _ = propose(threshold)
        assert drafter.calibration is not None
        seen, accepted = sum(drafter.calibration.seen), sum(drafter.calibration.accepted)
        num_accepted = int(said[0] == first)
        drafter.observe([Verdict(said, num_accepted, tuple(range(num_accepted + 1)), (0.0,) * len(said))])
        assert sum(drafter.calibration.seen) - seen == len(said)
        agreed = [a == b for a, b in zip(said, (first, second), strict=False)]
        assert sum(drafter.calibration.accepted) - accepted == pytest.approx(sum(agreed))


# ── 4. remembered features are those of the final tokens ─────────────────────────────────────────────────────────────


class OracleTrees(LearnedDrafter):
    """Remembers as the learned drafter does, but proposes random trees that often hold what the target will say."""

    artificial: ArtificialDrafter

    def propose(self, context: DraftContext, strategy: Strategy, noise_BDV: Tensor) -> DraftTree:
        return self.artificial.propose(context, strategy, noise_BDV)


def run_engine(
    tuner: StrategyTuner, requests: Sequence[Request], on_finish: Callable[[Rollout, Tensor | None], None], oracle: bool = False
) -> RolloutEngine:
    engine = RolloutEngine(CONFIG, dtype=torch.float64, max_batch_size=3, tuner=tuner)
    engine.load_policy(dict(POLICY.named_parameters()))
    drafter = make_drafter(3, engine.model)
    if oracle:
        answers: dict[tuple[str, int], Sequence[int]] = {}
        run_engine(Fixed(Strategy.OFF), requests, lambda r, _: answers.update({(r.problem_id, r.sample_index): r.token_ids}))
        drafter.__class__ = OracleTrees
        drafter.artificial = ArtificialDrafter("oracle", 0, answers)
    drafter.on_finish = on_finish
    engine.load_drafter(drafter)
    for _ in engine.generate(requests):
        pass
    return engine


def make_requests(num: int = 8) -> list[Request]:
    rng = random.Random(4)
    prompts = [random_tokens(rng.randint(1, 9), seed) for seed in range(num)]
    limits = [SamplingParams(temperature=0.7, max_tokens=rng.randint(2, 45), stop_ids=(STOP,)) for _ in range(num)]
    return [Request(f"p{i // 2}", i % 2, tuple(prompts[i // 2]), limits[i]) for i in range(num)]


@pytest.mark.parametrize(
    ("tuner", "oracle"),
    [
        (Fixed(Strategy("learned", 3, 1, 3)), False),
        (Fixed(Strategy("learned", 3, 2, 6)), False),
        (Fixed(Strategy("artificial", 4, 3, 10)), True),
        (Switching([Strategy.OFF, Strategy("learned", 3, 1, 3), Strategy("learned", 3, 2, 6)], 1), False),
    ],
    ids=["chain", "tree", "oracle trees", "switching"],
)
def test_features_remembered_through_rejections_are_those_of_a_plain_forward(tuner: StrategyTuner, oracle: bool) -> None:
    seen = []

    def on_finish(rollout: Rollout, features: Tensor | None) -> None:
        tokens = rollout.prompt_ids + rollout.token_ids
        assert features is not None
        assert len(features) == len(tokens) - 1
        torch.testing.assert_close(features, features_of(POLICY, tokens[:-1]), rtol=0, atol=1e-9)
        seen.append(rollout)

    requests = make_requests()
    engine = run_engine(tuner, requests, on_finish, oracle)
    assert len(seen) == len(requests)
    assert 0 < engine.stats.survivors_by_depth[1] < engine.stats.attempts_by_depth[1], "some accepted, some rejected"


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_recomputed_features_equal_captured_ones(chunk: int) -> None:
    captured = TrajectoryBuffer(10**6)
    engine = run_engine(Fixed(Strategy("learned", 3, 2, 6)), make_requests(), captured.add)
    for trajectory in captured.trajectories:
        expected = trajectory.features_TE
        trajectory.features_TE = None
        recompute = FeatureRecompute(engine.model, (engine.config.num_layers,), trajectory)
        while not recompute.advance(chunk):
            assert trajectory.features_TE is None
        torch.testing.assert_close(trajectory.features_TE, expected, rtol=0, atol=1e-9)
        assert trajectory.policy_version == engine.model.version


# ── 5. packed equals unpacked, cached equals uncached ────────────────────────────────────────────────────────────────


def make_batch(lengths: Sequence[int] = (6, 11, 3), seed: int = 0) -> PackedBatch:
    total = sum(lengths)
    weight = torch.tensor([float(t >= 2) for n in lengths for t in range(1, n)])
    return PackedBatch(torch.tensor(random_tokens(total, seed)), randn(total, SIZE, seed=seed), tuple(lengths), weight)


def unpack(batch: PackedBatch) -> list[PackedBatch]:
    tokens, features = batch.token_ids_N.split(batch.lengths), batch.features_NE.split(batch.lengths)
    weights = batch.weight_M.split([n - 1 for n in batch.lengths])
    return [PackedBatch(t, f, (len(t),), w) for t, f, w in zip(tokens, features, weights, strict=True)]


def unroll(model: DraftModel, batch: PackedBatch, num_steps: int) -> list[Tensor]:
    """Hidden states of every pair after each of its own steps."""
    pairs = align(batch.lengths)
    attend = Unrolled(model.config.layer, pairs.lengths)
    hidden, states = model.fuse(batch.features_NE[pairs.feature_index_M]), []
    for step in range(num_steps):
        index, _ = pairs.ahead(step)
        hidden = model(TARGET.embed(batch.token_ids_N[index]), hidden, pairs.positions_M + step, attend)
        states.append(hidden.detach())
    return states


def loss_of(model: DraftModel, batch: PackedBatch, preset: Preset = ONE_STEP) -> Tensor:
    """EAGLE's one step, written out."""
    pairs = align(batch.lengths)
    attend = PackedCausal(model.config.layer, pairs.lengths)
    embeddings = TARGET.embed(batch.token_ids_N[pairs.token_index_M])
    predicted = model(embeddings, batch.features_NE[pairs.feature_index_M], pairs.positions_M, attend)
    targets = batch.features_NE[pairs.token_index_M]
    probabilities = F.linear(targets, TARGET.head_VE).softmax(-1)
    logits = F.linear(predicted, TARGET.head_VE)
    return draft_loss(predicted, targets, logits, probabilities, batch.weight_M.double(), preset)


def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_sequences_alone() -> None:
    batch, model = make_batch(), make_model()
    parts = unpack(batch)
    packed = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    alone = sum(loss_of(model, part) * part.weight_M.sum() for part in parts) / batch.weight_M.sum()
    torch.testing.assert_close(alone, loss_of(model, batch), rtol=0, atol=1e-12)
    for found, expected in zip(packed, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_loss_is_its_formula_pair_by_pair() -> None:
    predicted, target, head = randn(5, 4, seed=1) * 2, randn(5, 4, seed=2), randn(7, 4, seed=3)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    total = 0.0
    for m in (0, 2, 3):
        for p, t in zip(predicted[m].tolist(), target[m].tolist(), strict=True):
            total += 0.7 / 4 * (0.5 * (p - t) ** 2 if abs(p - t) < 1 else abs(p - t) - 0.5)
        q, wanted = (head @ predicted[m]).exp(), (head @ target[m]).exp()
        total -= 1.3 * float((wanted / wanted.sum() * (q / q.sum()).log()).sum())
    found = draft_loss(predicted, target, predicted @ head.T, (target @ head.T).softmax(-1), weight, ONE_STEP)
    assert found.item() == pytest.approx(total / 3, abs=1e-12)


def test_a_training_step_moves_the_weights_as_plain_adamw_on_that_loss_does() -> None:
    model, reference = make_model(5), make_model(5)
    trainer = DrafterTrainer(model, TARGET, ONE_STEP, 1e-2, clip_grad_norm=1e9)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        loss = loss_of(reference, make_batch(seed=seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(make_batch(seed=seed)) == pytest.approx(loss.item(), abs=1e-10)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert trainer.num_tokens == 3 * (5 + 10 + 2)


@pytest.mark.parametrize("stages", [range(2, 40), [2, 5, 6, 17, 39], [39]], ids=["token by token", "in chunks", "all at once"])
@pytest.mark.parametrize("limit", [256, 4])
def test_the_cached_drafter_equals_the_uncached_training_forward(stages: Sequence[int], limit: int) -> None:
    """Committed token by token, by speculation, or in one piece after a stretch of OFF; then a chain on top."""
    tokens = [random_tokens(40, 1), random_tokens(40, 2)]
    features = [randn(40, SIZE, seed=3), randn(40, SIZE, seed=4)]
    drafter = make_drafter()
    calls = recorded_forward(drafter)
    for slot in range(2):
        drafter.admit(slot, make_request(tokens[slot][:2]))
    with patch.object(drafters_module, "_CATCH_UP_TOKENS", limit):
        for stage, length in enumerate(stages):
            lengths = [length, max(2, length - 3 * (stage % 2))] if stage else [length, length]
            rows = [tokens[b][:n] for b, n in enumerate(lengths)]
            if any(n - 1 <= done for n, done in zip(lengths, drafter.counts, strict=False)):
                rows = [tokens[b][:length] for b in range(2)]
            for slot, row in enumerate(rows):
                remember(drafter, slot, features[slot][: len(row) - 1])
            calls.clear()
            noise = randn(2, 4, VOCAB, seed=length).float()
            tree = drafter.propose(context_of(rows), Strategy("learned", 3, 1, 3), noise)
            for slot, row in enumerate(rows):
                embeddings, inputs = TARGET.embed(torch.tensor(row[1:])), features[slot][: len(row) - 1]
                drafted = tree.tokens_BN[slot, 1:].tolist()
                for depth in range(3):
                    output = plain_forward(embeddings, inputs)[-1]
                    score = TARGET.logits(output) / drafter.tau + noise[slot, depth]
                    assert drafted[depth] == int(score.argmax())
                    if depth < 2:
                        produced = calls[depth - 2][3].view(2, -1, SIZE)[slot]
                        embeddings = torch.cat([embeddings, TARGET.embed(torch.tensor(drafted[depth : depth + 1]))])
                        inputs = torch.cat([inputs, output[None]])
                        torch.testing.assert_close(produced[-1], plain_forward(embeddings, inputs)[-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("limit", [256, 3])
def test_what_catching_up_returns_equals_the_uncached_training_forward(limit: int) -> None:
    drafter = make_drafter()
    tokens, features = [random_tokens(50, 1), random_tokens(50, 2)], [randn(50, SIZE, seed=3), randn(50, SIZE, seed=4)]
    for slot in range(2):
        drafter.admit(slot, make_request(tokens[slot][:2]))
        remember(drafter, slot, features[slot])
    drafter.cache.reserve(2, 64)
    with patch.object(drafters_module, "_CATCH_UP_TOKENS", limit), torch.no_grad():
        for lengths in ([2, 9], [3, 10], [17, 11], [18, 30], [50, 50]):
            context = context_of([tokens[b][:n] for b, n in enumerate(lengths)])
            found = drafter._catch_up(context, drafter._enter(context), [n - 1 for n in lengths], None)
            drafter.counts[:2] = [n - 1 for n in lengths]
            for slot, length in enumerate(lengths):
                expected = plain_forward(TARGET.embed(torch.tensor(tokens[slot][1:length])), features[slot][: length - 1])[-1]
                torch.testing.assert_close(found[slot], expected, rtol=0, atol=1e-9)


def test_a_long_prompt_that_joins_a_long_response_is_caught_up_within_the_cache() -> None:
    """One row is up to date, the other misses many chunks: the first row's rubbish must stay inside its reservation."""
    drafter = make_drafter()
    old, new = random_tokens(122, 1), random_tokens(100, 2)
    features = [randn(122, SIZE, seed=3), randn(100, SIZE, seed=4)]
    strategy = Strategy("learned", 1, 1, 1)
    with patch.object(drafters_module, "_CATCH_UP_TOKENS", 4):
        drafter.admit(0, make_request(old))
        remember(drafter, 0, features[0][:120])
        drafter.propose(context_of([old[:121]]), strategy, randn(1, 2, VOCAB))
        drafter.admit(1, make_request(new))
        remember(drafter, 0, features[0][:121])
        remember(drafter, 1, features[1][:99])
        noise = randn(2, 2, VOCAB).float()
        tree = drafter.propose(context_of([old, new]), strategy, noise)
    for slot, row in enumerate((old, new)):
        output = plain_forward(TARGET.embed(torch.tensor(row[1:])), features[slot][: len(row) - 1])[-1]
        assert tree.tokens_BN[slot, 1] == (TARGET.logits(output) / drafter.tau + noise[slot, 0]).argmax()


def reference_tree(tokens: list[int], features: Tensor, strategy: Strategy, noise: Tensor, tau: float) -> set[tuple[int, ...]]:
    """EAGLE-2's growth by brute force: every node's state by an uncached forward over its whole line. Returns the drafted
    nodes as paths of tokens from the root."""

    def states(path: tuple[int, ...]) -> Tensor:
        embeddings, inputs = TARGET.embed(torch.tensor(tokens[1:])), features[: len(tokens) - 1]
        for token in path:
            state = plain_forward(embeddings, inputs)[-1:]
            embeddings, inputs = torch.cat([embeddings, TARGET.embed(torch.tensor([token]))]), torch.cat([inputs, state])
        return plain_forward(embeddings, inputs)[-1]

    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for depth in range(strategy.depth):
        level = []
        for confidence, path in frontier:
            logprobs = (TARGET.logits(states(path)) / tau + noise[depth]).log_softmax(-1)
            for token in logprobs.topk(strategy.width).indices.tolist():
                level.append((confidence + min(float(logprobs[token]), -1e-4), (*path, token)))
        pool += level
        frontier = sorted(level, reverse=True)[: strategy.width]
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
    tree = drafter.propose(context_of(rows), strategy, noise)
    for slot, row in enumerate(rows):
        tokens, parents = tree.tokens_BN[slot].tolist(), tree.parents_BN[slot].tolist()
        assert (tokens[0], parents[0]) == (row[-1], -1)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        assert len(set(paths)) == len(paths) == strategy.budget + 1 or strategy.budget > strategy.width * strategy.depth
        assert set(paths[1:]) == reference_tree(row, features[slot], strategy, noise[slot], drafter.tau)


# ── 6. preemption ────────────────────────────────────────────────────────────────────────────────────────────────────


def ready_buffer(num: int = 4, length: int = 40, with_features: bool = True) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(10**6)
    for index in range(num):
        tokens = random_tokens(length, index)
        features = features_of(POLICY, tokens[:-1]) if with_features else None
        buffer.add(make_rollout(tokens, 5, index=index), features)
    return buffer


def make_spot(
    buffer: TrajectoryBuffer,
    target: PackedTransformer = TARGET,
    carry_longest: int = 2,
    max_passes: float | None = None,
) -> SpotTrainer:
    trainer = DrafterTrainer(make_model(), target, HASS)
    return SpotTrainer(trainer, buffer, tokens_per_micro_step=48, carry_longest=carry_longest, max_passes=max_passes)


@pytest.mark.parametrize("with_features", [True, False], ids=["training", "recomputing"])
@pytest.mark.parametrize("preempted_in", [0, 1, 5])
def test_the_trainer_returns_within_the_micro_step_in_which_it_is_preempted(with_features: bool, preempted_in: int) -> None:
    """should_stop becomes true in the middle of micro-step `preempted_in`: not one more begins. No micro-step exceeds its
    bound of tokens, whatever lies in the buffer."""
    begun: list[int] = []
    sizes: list[int] = []
    spot = make_spot(ready_buffer(3, 150, with_features))
    micro_step = spot.micro_step

    def counted() -> DrafterReport | None:
        begun.append(len(begun) + 1)
        return micro_step()

    spot.micro_step = counted
    train = spot.trainer.step
    spot.trainer.step = lambda batch: (sizes.append(len(batch.token_ids_N)), train(batch))[1]
    with patch.object(TARGET, "forward_capturing", wraps=TARGET.forward_capturing) as forward:
        report = spot.run(lambda: len(begun) >= preempted_in)
        sizes += [len(call.args[0]) for call in forward.call_args_list]
    assert len(begun) == preempted_in == report.num_micro_steps == len(sizes)
    assert all(size <= 48 + 2 for size in sizes)
    # without features, four chunks complete the first trajectory, and the fifth micro-step trains on it
    assert (report.num_tokens > 0) == (preempted_in > 0 if with_features else preempted_in == 5)


def test_with_nothing_to_train_on_the_trainer_returns_at_once() -> None:
    report = make_spot(TrajectoryBuffer(100)).run(lambda: False)
    assert (report.num_micro_steps, report.num_tokens) == (0, 0)


def test_sessions_go_on_where_the_last_one_was_preempted() -> None:
    """Many sessions of one micro-step train as one long session does."""

    def train(sessions: Iterable[int]) -> list[Tensor]:
        spot = make_spot(ready_buffer(3, 150, with_features=False))
        for num_steps in sessions:
            left = iter(range(num_steps))
            spot.run(lambda left=left: next(left, None) is None)
        return [p.detach().clone() for p in spot.trainer.model.parameters()]

    for one, many in zip(train([9]), train([1] * 9), strict=True):
        assert torch.equal(one, many)


def test_a_micro_step_has_the_tokens_that_fit_its_share_of_a_step() -> None:
    """On a machine where a micro-step costs 3 ms and 50 µs per token, the size settles where it takes just its share."""
    size = MicroStepSize(4096)
    assert size.num_tokens(10.0) == size.num_tokens(None) == MIN_TOKENS, "nothing is known yet"
    for step_seconds in (10.0, 100.0, 20.0):
        for _ in range(60):
            num_tokens = size.num_tokens(step_seconds)
            size.observe(num_tokens, 3e-3 + 5e-5 * num_tokens)
        wanted = min((MICRO_STEP_SHARE * step_seconds - 3e-3) / 5e-5, 4096)
        assert size.num_tokens(step_seconds) == pytest.approx(wanted, rel=0.01)
    assert size.num_tokens(0.01) == MIN_TOKENS
    assert MicroStepSize(48).num_tokens(1e9) == 48, "the user's bound holds"


def test_micro_steps_grow_with_the_step_before_and_never_beyond_their_bound() -> None:
    spot = SpotTrainer(DrafterTrainer(make_model(), TARGET, HASS), ready_buffer(4, 150), tokens_per_micro_step=400)
    sizes: list[int] = []
    train = spot.trainer.step
    spot.trainer.step = lambda batch: (sizes.append(len(batch.token_ids_N)), train(batch))[1]
    for step_seconds, fits in ((None, 1), (1e-9, 1), (1e9, 400)):
        spot.step_seconds = step_seconds
        sizes.clear()
        for _ in range(4):
            spot.micro_step()
        assert all(max(fits, MIN_TOKENS) * 0.7 < size <= max(fits, MIN_TOKENS) + 2 for size in sizes), sizes


def test_the_report_says_when_the_trainer_was_preempted_and_covers_all_of_its_time() -> None:
    spans: list[Span] = []
    spot = make_spot(ready_buffer(2, 60))
    spot.on_span = spans.append
    steps = iter(range(3))
    report = spot.run(lambda: next(steps, None) is None)
    assert report.preempted_at == spans[-1].end
    assert report.seconds == pytest.approx(sum(span.end - span.start for span in spans), abs=1e-12)
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert report.max_micro_step_seconds <= report.seconds
    spot.buffer.trajectories.clear()
    assert spot.run(lambda: False).preempted_at is None, "it had nothing to do"


# ── 7. one step off ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_of_the_previous_step_are_trained_on_with_features_of_the_new_policy() -> None:
    target = PackedTransformer.from_module(POLICY, torch.float64, version=0)
    spot = make_spot(ready_buffer(6, 20), target, carry_longest=2)
    rollouts = [make_rollout(random_tokens(10 + 7 * i, 100 + i), 4, f"q{i}") for i in (3, 0, 5, 1, 4, 2)]  # of all ranks
    next_policy = make_policy(seed=9)
    spot.end_step(rollouts, 10.0)
    target.load(dict(next_policy.named_parameters()), 1)
    longest = {rollouts[2].prompt_ids + rollouts[2].token_ids, rollouts[4].prompt_ids + rollouts[4].token_ids}
    assert {t.token_ids for t in spot.buffer.trajectories} == longest

    batches: list[PackedBatch] = []
    train = spot.trainer.step
    spot.trainer.step = lambda batch: (batches.append(batch), train(batch))[1]
    steps = iter(range(20))
    spot.run(lambda: next(steps, None) is None)
    assert len(batches) > 5
    found = set()
    for batch in batches:
        for window in unpack(batch):
            tokens = tuple(window.token_ids_N.tolist())
            (source, start) = next(
                (s, i) for s in longest for i in range(len(s) - len(tokens) + 1) if s[i : i + len(tokens)] == tokens
            )
            expected = features_of(next_policy, source[:-1])[start : start + len(tokens)]
            torch.testing.assert_close(window.features_NE, expected, rtol=0, atol=1e-9)
            found.add(source)
    assert found == longest


def test_features_of_a_policy_that_was_replaced_are_never_trained_on() -> None:
    """Captured under version 0; version 1 is published without a carry over, and version 2 amid the recomputing for it."""
    target = PackedTransformer.from_module(POLICY, torch.float64, version=0)
    spot = make_spot(ready_buffer(2, 140), target)
    # Three chunks per trajectory; nothing trains before one is whole, then recomputing and training alternate.
    # Version 1 ends in the middle of the second trajectory.
    for version, policy, trains in ((1, make_policy(seed=9), "...T."), (2, make_policy(seed=10), "...T.T.T.TT")):
        target.load(dict(policy.named_parameters()), version)
        done = ["T" if (report := spot.micro_step()) and report.num_tokens else "." for _ in trains]
        assert "".join(done) == trains
    for trajectory in spot.buffer.trajectories:
        assert trajectory.policy_version == 2
        torch.testing.assert_close(trajectory.features_TE, features_of(policy, trajectory.token_ids[:-1]), rtol=0, atol=1e-9)


def test_the_buffer_stays_within_its_bytes_the_oldest_features_leave_first_then_the_oldest_tokens() -> None:
    tokens_bytes, features = TOKEN_ID_BYTES * 30, torch.zeros(29, 3 * SIZE)  # of any width
    rollouts = [make_rollout(random_tokens(30, index), 3, index=index) for index in range(7)]
    for max_bytes, num_kept, num_ready in (
        (7 * tokens_bytes + 7 * features.nbytes, 7, 7),
        (7 * tokens_bytes + 3 * features.nbytes - 1, 7, 2),
        (5 * tokens_bytes, 5, 0),
    ):
        buffer = TrajectoryBuffer(max_bytes)
        for rollout in rollouts:
            buffer.add(rollout, features.clone())
            assert buffer.num_bytes <= max_bytes
        kept = [rollout.prompt_ids + rollout.token_ids for rollout in rollouts]
        assert [t.token_ids for t in buffer.trajectories] == kept[-num_kept:]
        assert [t.token_ids for t in buffer.ready()] == kept[7 - num_ready :]
    buffer.add(make_rollout([1, 2], 1))
    assert len(buffer) == 5, "too short to hold a pair"


def test_recomputed_features_make_room_for_themselves_and_are_not_recomputed_again() -> None:
    """Otherwise two trajectories that do not fit together would be recomputed in turns for ever."""
    length, num = 40, 4
    features_bytes = (length - 1) * SIZE * 8
    spot = make_spot(TrajectoryBuffer(num * TOKEN_ID_BYTES * length + 2 * features_bytes), carry_longest=num)
    for index in range(num):
        spot.add(make_rollout(random_tokens(length, index), 5, index=index), None)
    steps = iter(range(20))
    report = spot.run(lambda: next(steps, None) is None)
    assert report.recomputed_tokens == num * (length - 1), "each once"
    assert len(spot.buffer.ready(TARGET.version)) == 2
    assert spot.buffer.num_bytes <= spot.buffer.max_bytes


def test_captured_features_are_trained_on_only_where_the_configuration_says_so() -> None:
    for keeps_captured in (True, False):
        spot = SpotTrainer(
            DrafterTrainer(make_model(), TARGET, HASS), TrajectoryBuffer(10**6), 48, keeps_captured=keeps_captured
        )
        for index in range(3):
            tokens = random_tokens(60, index)
            spot.add(make_rollout(tokens, 5, index=index), features_of(POLICY, tokens[:-1]))
        steps = iter(range(10))
        report = spot.run(lambda steps=steps: next(steps, None) is None)
        assert report.num_tokens > 0
        assert (report.captured_tokens > 0) == keeps_captured
        assert report.recomputed_tokens == (0 if keeps_captured else 3 * 59)


# ── little to learn, and much time ───────────────────────────────────────────────────────────────────────────────────


def count_predicted(spot: SpotTrainer) -> list[int]:
    """Response tokens that every batch predicts, from here on."""
    predicted: list[int] = []
    train = spot.trainer.step

    def counted(batch: PackedBatch) -> float:
        predicted.append(int(batch.weight_M.sum()))
        return train(batch)

    spot.trainer.step = counted
    return predicted


def run_idle(spot: SpotTrainer, max_micro_steps: int = 200) -> DrafterReport:
    """A session that nobody else ends."""
    left = iter(range(max_micro_steps))
    return spot.run(lambda: next(left, None) is None)


@pytest.mark.parametrize("max_passes", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(("num", "length", "num_prompt"), [(4, 60, 5), (3, 150, 130), (2, 12, 4)])
def test_responses_are_gone_through_as_often_as_allowed_and_no_more(
    max_passes: float, num: int, length: int, num_prompt: int
) -> None:
    """However long the prompts are: those are read, and not learned."""
    buffer = TrajectoryBuffer(10**7)
    for index in range(num):
        tokens = random_tokens(length, index)
        buffer.add(make_rollout(tokens, num_prompt, index=index), features_of(POLICY, tokens[:-1]))
    spot = make_spot(buffer, max_passes=max_passes)
    predicted, report, allowed = count_predicted(spot), run_idle(spot), max_passes * num * (length - num_prompt)
    assert allowed - 48 < sum(predicted) <= allowed, "what remains is less than a micro-step"
    assert predicted
    assert report.is_limited
    assert report.preempted_at is None


def test_long_prompts_use_up_no_passes() -> None:
    """A micro-step may read as many tokens as may be learned in all, and learns a quarter of them."""
    buffer = TrajectoryBuffer(10**7)
    for index in range(4):
        tokens = random_tokens(150, index)
        buffer.add(make_rollout(tokens, 110, index=index), features_of(POLICY, tokens[:-1]))
    spot = make_spot(buffer, max_passes=4.0)
    spot.train_size = MicroStepSize(1024)
    spot.train_size.seconds_per_token, spot.step_seconds = 1e-9, 1.0
    predicted = count_predicted(spot)
    run_idle(spot)
    assert 640 - MIN_TOKENS < sum(predicted) <= 640


def test_at_the_limit_of_passes_features_are_recomputed_and_what_they_add_is_trained_on() -> None:
    spot = make_spot(ready_buffer(2, 60), max_passes=1.0)
    predicted = count_predicted(spot)
    run_idle(spot)
    first, again = sum(predicted), run_idle(spot)
    assert 110 - 48 < first <= 110
    assert (again.num_micro_steps, again.is_limited) == (0, True)
    spot.add(make_rollout(random_tokens(150, 9), 5, index=9), None)
    report = run_idle(spot)
    assert report.recomputed_tokens == 149
    assert 255 - 48 < sum(predicted) <= 255, "of 110 + 145"


@pytest.mark.parametrize("is_broken_off", [True, False])
def test_every_step_may_go_through_its_responses_anew(is_broken_off: bool) -> None:
    spot = make_spot(TrajectoryBuffer(10**6), max_passes=1.0)
    rollouts = [make_rollout(random_tokens(80, index), 5, f"q{index}") for index in range(2)]
    predicted = count_predicted(spot)
    for _ in range(3):
        if is_broken_off and predicted:
            spot.abandon()
        else:
            spot.end_step(rollouts, 1.0)
        predicted.clear()
        assert run_idle(spot).is_limited
        assert 150 - 48 < sum(predicted) <= 150


def test_only_a_session_that_could_have_gone_on_says_that_it_was_limited() -> None:
    assert not run_idle(make_spot(TrajectoryBuffer(100), max_passes=1.0)).is_limited, "there was nothing to train on"
    assert not run_idle(make_spot(ready_buffer(), max_passes=4.0), 3).is_limited, "it was preempted"
    spot = make_spot(ready_buffer(), max_passes=None)
    assert run_idle(spot, 60).num_tokens > 10 * spot.buffer.num_tokens
    reports = [DrafterReport(1, is_limited=is_limited) for is_limited in (True, False)]
    assert reports[0].plus(reports[1]).is_limited
    assert reports[1].plus(reports[0]).is_limited


class OneDevice(TorchDispatchMode):
    """Refuses what mixes devices, as a GPU does; numbers of the device `meta`, which has none, read as 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
            return 1
        if func not in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            devices = {tensor.device.type for tensor in tensors if tensor.dim()}
            assert len(devices) <= 1, f"{func} of {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("preset", "draft_vocab"), [("eagle", None), ("hass", None), ("eagle3", VOCAB - 9)])
def test_training_and_recomputing_mix_no_devices(preset: str, draft_vocab: int | None) -> None:
    config = replace(CONFIG, num_layers=4)
    with OneDevice():
        target = PackedTransformer(config, torch.float32, "meta")
        with torch.device("meta"):
            model = DraftModel(drafter_config(config, PRESETS[preset].method, draft_vocab))
        trainer = DrafterTrainer(model, target, PRESETS[preset])
        buffer = TrajectoryBuffer(10**9)
        for length in (20, 30):
            buffer.add(make_rollout([1] * length, 4))
            recompute = FeatureRecompute(target, trainer.capture, buffer.trajectories[-1])
            while not recompute.advance(16):
                pass
        batch = buffer.sample(60)
        assert batch is not None
        assert batch.features_NE.is_meta
        with torch.enable_grad():
            trainer.loss(batch).backward()
        assert all(p.grad is not None and p.grad.is_meta for p in trainer.parameters)
        shared = trainer.shared_tensors()
        assert {tensor.device.type for tensor in shared} == {"cpu", "meta"}, "AdamW counts its steps on the CPU"


# ── 9. the target stays what it is, and nothing is skipped in silence ────────────────────────────────────────────────


def tensors_within(value: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor that an object holds, at any depth."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, list):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return {}
    return {k: v for key, child in items for k, v in tensors_within(child, f"{name}.{key}").items()}


@pytest.mark.parametrize("tied", [True, False])
def test_training_the_drafter_changes_no_tensor_of_the_target(tied: bool) -> None:
    policy = Transformer(replace(CONFIG, tie_embeddings=tied)).double().initialize(3, 0.3)
    target = PackedTransformer.from_module(policy, torch.float64)
    held = tensors_within(target)
    assert len(held) > 15
    before, policy_before = content_hash(held), content_hash(policy.state_dict())
    spot = make_spot(ready_buffer(3, 60, with_features=False), target)
    drafter_before = content_hash(spot.trainer.model.state_dict())
    steps = iter(range(20))
    report = spot.run(lambda: next(steps, None) is None)
    assert report.num_tokens > 0
    assert content_hash(spot.trainer.model.state_dict()) != drafter_before
    assert content_hash(tensors_within(target)) == before
    assert content_hash(policy.state_dict()) == policy_before
    shared = {t.data_ptr() for t in held.values()}
    assert not shared & {t.data_ptr() for t in spot.trainer.model.state_dict().values()}


def test_training_on_what_the_target_says_lowers_the_loss() -> None:
    spot = make_spot(ready_buffer(4, 60))
    spot.trainer.model.initialize(1)
    losses = [done.loss for _ in range(60) if (done := spot.micro_step()) is not None]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_a_drafter_directory_gives_back_what_was_saved(tmp_path: Path) -> None:
    save_drafter(tmp_path, MODEL, torch.float64, {"policy_hash": "abc"})
    stored = load_drafter(tmp_path, CONFIG)
    assert stored.config == MODEL.config
    assert content_hash(stored.tensors) == content_hash(MODEL.state_dict())
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["tlt"] == {"policy_hash": "abc"}
    assert described["architectures"] == ["EagleLlamaForCausalLM"]
    packed = PackedDrafter(MODEL.config, torch.float64)
    packed.load(stored.tensors, 7)
    embeddings, features = randn(6, SIZE, seed=1), randn(6, SIZE, seed=2)
    attend = PackedCausal(MODEL.config.layer, [6])
    with torch.no_grad():
        found = packed.forward(embeddings, features, attend.positions(), attend)
    torch.testing.assert_close(found, plain_forward(embeddings, features), rtol=0, atol=1e-12)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "config.json is missing"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "no tensor": (lambda p: _edit(p / "model.safetensors", lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    "odd tensor": (lambda p: _edit(p / "model.safetensors", lambda t: t.update(odd=torch.ones(2))), "odd is"),
    "other shape": (
        lambda p: _edit(p / "model.safetensors", lambda t: t.update({"fc.weight": torch.ones(3, 4)})),
        "fc.weight is \\[3, 4\\]",
    ),
    "cut short": (lambda p: _truncate(p / "model.safetensors"), "cannot be read"),
    "other architecture": (lambda p: (p / "config.json").write_text('{"architectures": ["X"]}'), "architectures"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_drafter_that_is_not_whole_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "drafter"
    save_drafter(path, MODEL, torch.float32)
    apply, message = DAMAGES[damage]
    apply(path)
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(path, CONFIG)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    save_drafter(tmp_path, MODEL, torch.float32)
    with pytest.raises(UserError, match="drafter for this model"):
        load_drafter(tmp_path, replace(CONFIG, hidden_size=64))


def test_packed_weights_that_lack_a_tensor_are_refused() -> None:
    for name in MODEL.state_dict():
        partial = {k: v for k, v in MODEL.state_dict().items() if k != name}
        with pytest.raises(RuntimeError, match=f"{name} is missing"):
            PackedDrafter(MODEL.config, torch.float64).load(partial, 0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises_and_leaves_the_weights_alone(poison: float) -> None:
    trainer = DrafterTrainer(make_model(), TARGET, HASS)
    before = content_hash(trainer.model.state_dict())
    batch = make_batch()
    batch.features_NE[4] = poison
    with pytest.raises(FloatingPointError, match="loss is"):
        trainer.step(batch)
    assert content_hash(trainer.model.state_dict()) == before


# ── 10. one drafter for all replicas; a run that goes on ─────────────────────────────────────────────────────────────


def test_drafters_averaged_by_tokens_have_the_mean_weights_and_the_mean_adam_moments() -> None:
    """Two replicas that trained on different batches, and the step that follows, against AdamW written out by hand."""
    trainers = [DrafterTrainer(make_model(), TARGET, ONE_STEP, 1e-2, clip_grad_norm=1e9) for _ in range(2)]
    for seed in range(3):
        trainers[0].step(make_batch((9,), seed=seed))
    trainers[1].step(make_batch((6, 11, 3), seed=7))
    weights = [trainer.num_tokens / sum(t.num_tokens for t in trainers) for trainer in trainers]
    assert weights == [24 / 41, 17 / 41]

    def average(values: Sequence[Tensor]) -> Tensor:
        return weights[0] * values[0] + weights[1] * values[1]

    names = [name for name, _ in trainers[0].model.named_parameters()]
    parameters = [dict(t.model.named_parameters()) for t in trainers]
    states = [[t.optimizer.state[p[name]] for name in names] for t, p in zip(trainers, parameters, strict=True)]
    mean = [average([p[name].detach() for p in parameters]) for name in names]
    first = [average([s[i]["exp_avg"] for s in states]) for i in range(len(names))]
    second = [average([s[i]["exp_avg_sq"] for s in states]) for i in range(len(names))]
    num_steps = weights[0] * 3 + weights[1] * 1

    for tensors in zip(*(t.shared_tensors() for t in trainers), strict=True):  # as average_weighted does over ranks
        averaged = average(tensors)
        for tensor in tensors:
            tensor.copy_(averaged)

    batch, wanted = make_batch(seed=11), []
    grads = torch.autograd.grad(loss_of(trainers[0].model, batch), [parameters[0][name] for name in names])
    for p, m, v, g in zip(mean, first, second, grads, strict=True):
        m, v, t = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g, num_steps + 1
        wanted.append(p - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
    for trainer in trainers:
        trainer.step(batch)
        for found, expected in zip(trainer.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-6)  # the step count is float32


def test_a_replica_that_never_trained_shares_tensors_of_the_same_shapes() -> None:
    idle, busy = DrafterTrainer(make_model(), TARGET, HASS), DrafterTrainer(make_model(), TARGET, HASS)
    busy.step(make_batch())
    assert [t.shape for t in idle.shared_tensors()] == [t.shape for t in busy.shared_tensors()]
    assert idle.step(make_batch()) == pytest.approx(DrafterTrainer(make_model(), TARGET, HASS).step(make_batch()), abs=0)


def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = make_model()
    trainer = DrafterTrainer(model, TARGET, HASS)
    for seed in range(3):
        trainer.step(make_batch(seed=seed))
    torch.save({"model": model.state_dict(), "trainer": trainer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)

    restored = DrafterTrainer(make_model(seed=77), TARGET, HASS)
    restored.model.load_state_dict(saved["model"])
    restored.load_state_dict(saved["trainer"])
    assert restored.num_tokens == trainer.num_tokens
    for seed in range(3, 6):
        assert restored.step(make_batch(seed=seed)) == trainer.step(make_batch(seed=seed))
    assert content_hash(restored.model.state_dict()) == content_hash(model.state_dict())


def test_a_restored_spot_trainer_starts_its_next_step_with_the_same_tokens_and_pace(tmp_path: Path) -> None:
    spot = make_spot(ready_buffer(6, 150))
    steps = iter(range(5))
    spot.run(lambda: next(steps, None) is None)
    spot.end_step([make_rollout(random_tokens(20 + 9 * i, i), 4, f"q{i}") for i in range(5)], seconds=12.0)
    torch.save(spot.state_dict(), tmp_path / "state.pt")

    restored = make_spot(TrajectoryBuffer(10**6))
    restored.trainer.model.load_state_dict(spot.trainer.model.state_dict())
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.trainer.num_tokens == spot.trainer.num_tokens > 0
    assert [t.token_ids for t in restored.buffer.trajectories] == [t.token_ids for t in spot.buffer.trajectories]
    assert len(restored.buffer) == spot.carry_longest
    assert restored.train_size.num_tokens(12.0) == spot.train_size.num_tokens(spot.step_seconds)
    for one in (spot, restored):
        one.train_size = MicroStepSize(48)
        one.buffer.random.seed(3)
        steps = iter(range(9))
        one.run(lambda steps=steps: next(steps, None) is None)
    assert content_hash(restored.trainer.model.state_dict()) == content_hash(spot.trainer.model.state_dict())
