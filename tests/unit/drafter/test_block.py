"""Block drafters against their forward written out: the trainable copy, the packed one, and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import VOCAB, Given
from tests.refused import refused
from tests.unit.drafter.block_parts import (
    FORMS,
    NUM_DRAFTED,
    SIZE,
    TARGET,
    captured_of,
    drafting_slots,
    make_batch,
    make_block,
    make_drafter,
    plain_logits,
    plain_slots,
)
from tests.unit.drafter.parts import context_of, make_request, randn, random_tokens
from tlt.base.strategy import Strategy
from tlt.base.types import SamplingParams
from tlt.drafter.block import BlockModel, PackedBlock, run_blocks
from tlt.drafter.drafting.learned import block_cache
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.forms import pack_drafter
from tlt.drafter.shape import Method, spread_layers
from tlt.models import kv_cache

forms = pytest.mark.parametrize(("method", "draft_vocab"), FORMS)


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_reads_layers_spread_evenly_from_the_second_to_the_last_but_one() -> None:
    """DFlash's outputs 1 to N - 3 are the inputs 2 to N - 2."""
    assert spread_layers(36, 5) == (2, 10, 18, 26, 34)
    assert spread_layers(28, 2) == (2, 26)
    assert spread_layers(28, 1) == (26,)
    for num_layers in range(2, 12):
        for num_read in range(1, min(num_layers, 6)):
            layers = spread_layers(num_layers, num_read)
            assert len(set(layers)) == num_read
            assert list(layers) == sorted(layers)
            assert 1 <= layers[0] <= layers[-1] < num_layers
    with refused("5 layers reads as many of the model's, which has only 4"):
        spread_layers(4, 5)
    with refused("reads layers before the last, and this model has one; use eagle"):
        spread_layers(1, 1)


def test_its_costs_are_those_of_the_matrices_that_are_read() -> None:
    model = make_block("dspark", VOCAB - 3)
    sizes = {name: t.numel() for name, t in model.state_dict().items() if t.dim() == 2}
    layers = sum(size for name, size in sizes.items() if name.startswith("layers."))
    shape = model.config
    assert shape.weights_per_draft == layers
    assert shape.weights_per_level == sizes["markov_head.markov_w2.weight"]


# ── the forward ─────────────────────────────────────────────────────────────────────────────────────────────


@forms
@pytest.mark.parametrize("layers", [1, 3])
def test_the_trainable_drafter_computes_the_forward_written_out(
    method: Method, draft_vocab: int | None, layers: int
) -> None:
    model = make_block(method, draft_vocab, layers=layers)
    batch, anchors = make_batch(model.config), [[1, 4, 8], [], [5, 11]]
    with torch.no_grad():
        found = run_blocks(model, batch, anchors, TARGET.embed)
    start, blocks = 0, iter(found)
    for length, places in zip(batch.lengths, anchors, strict=True):
        tokens = batch.token_ids_N[start : start + length].tolist()
        for place in places:
            plain = plain_slots(model, tokens, batch.captured_NF[start : start + length], place)
            torch.testing.assert_close(next(blocks), plain, rtol=0, atol=1e-9)
        start += length


@forms
def test_the_packed_drafter_computes_what_the_trainable_one_does(
    method: Method, draft_vocab: int | None
) -> None:
    model = make_block(method, draft_vocab)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    batch, anchors = make_batch(model.config), [[1, 4, 8], [2], [5, 11]]
    tokens = torch.tensor([[3, 9], [20, 0]])
    with torch.no_grad():
        hidden = run_blocks(model, batch, anchors, TARGET.embed)
        torch.testing.assert_close(
            run_blocks(packed, batch, anchors, TARGET.embed), hidden, rtol=0, atol=1e-9
        )
        logits = model.logits(hidden, model.rows(TARGET.head_VE, None))
        torch.testing.assert_close(packed.logits(hidden, TARGET), logits, rtol=0, atol=1e-9)
        expected, found = model.bias(tokens, None), packed.bias(tokens)
        assert (expected is None) == (found is None) == (method == "dflash")
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_chosen_vocabulary_ranks_with_its_rows_of_head_and_markov_head() -> None:
    model, chosen = make_block("dspark"), torch.tensor([3, 4, 9, 30, 60])
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    hidden, tokens = randn(2, SIZE), torch.tensor([5, 6])
    with torch.no_grad():
        whole = packed.logits(hidden, TARGET), packed.bias(tokens)
        packed.choose(chosen)
        part = packed.logits(hidden, TARGET), packed.bias(tokens)
        for all_tokens, some in zip(whole, part, strict=True):
            assert all_tokens is not None
            assert some is not None
            torch.testing.assert_close(some, all_tokens[:, chosen], rtol=0, atol=1e-12)
        trained = model.bias(tokens, chosen)
        assert trained is not None
        torch.testing.assert_close(trained, part[1], rtol=0, atol=1e-12)


# ── drafts ──────────────────────────────────────────────────────────────────────────────────────────────────


def plain_chain(
    model: BlockModel, tokens: Sequence[int], captured: Tensor, noise_LV: Tensor, tau: float, scale: float
) -> list[int]:
    """A level of noise for each token."""
    slots = drafting_slots(model, plain_slots(model, tokens, captured, len(tokens) - 1, len(noise_LV)))
    drafted, before = [], tokens[-1]
    for hidden, noise_V in zip(slots, noise_LV, strict=True):
        before = int((plain_logits(model, hidden, before) * scale / tau + noise_V).argmax())
        drafted.append(before)
    return drafted


def plain_tree(
    model: BlockModel,
    tokens: Sequence[int],
    captured: Tensor,
    strategy: Strategy,
    noise_LV: Tensor,
    tau: float,
) -> set[tuple[int, ...]]:
    """The tree's nodes as paths of tokens: every slot's best behind each of the best paths so far."""
    slots = drafting_slots(model, plain_slots(model, tokens, captured, len(tokens) - 1, strategy.depth))
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for hidden, noise_V in zip(slots, noise_LV, strict=True):
        found = []
        for confidence, path in frontier:
            logits = plain_logits(model, hidden, path[-1] if path else tokens[-1])
            logprobs = (logits / tau + noise_V).log_softmax(-1)
            for token in logprobs.topk(strategy.width).indices.tolist():
                found.append((confidence + min(float(logprobs[token]), -1e-4), (*path, token)))
        pool += found
        frontier = sorted(found, reverse=True)[: strategy.width]
    return {path for _, path in sorted(pool, reverse=True)[: strategy.budget]}


def remember(drafter: LearnedDrafter, slot: int, captured: Tensor, start: int, end: int) -> None:
    if end > start:
        drafter.remember([slot], [start], captured[None, start:end])


LENGTHS = [(1, 5, 2), (2, 6, 12), (9, 7, 13), (10, 30, 14), (30, 30, 30)]
"""Tokens of three rows at every stage. Those of the last, where rows are equally long, are given no mask."""


@forms
@pytest.mark.parametrize("group", [8192, 9])
def test_chains_of_a_growing_ragged_batch_are_those_of_the_forward_written_out(
    method: Method, draft_vocab: int | None, group: int
) -> None:
    """Rows join late, grow by one token or many, at several temperatures; new weights between. Of a shorter
    chain the block is shorter, too."""
    model = make_block(method, draft_vocab)
    drafter = make_drafter(model)
    rows = [random_tokens(30, seed) for seed in range(3)]
    captured = [captured_of(model.config, row) for row in rows]
    params = [SamplingParams(temperature=t) for t in (1.0, 0.6, 0.0)]
    known, depths = [0, 0, 0], (NUM_DRAFTED, 2, 1, 3, 2)
    for slot, row in enumerate(rows):
        drafter.admit(slot, make_request(row[:2]))
    with patch.object(kv_cache, "PREFILL_TOKENS", group), patch.object(block_cache, "_ROWS_AT_ONCE", group):
        for stage, lengths in enumerate(LENGTHS):
            for slot, length in enumerate(lengths):
                remember(drafter, slot, captured[slot], known[slot], length - 1)
                known[slot] = length - 1
            if stage == 2:
                model = make_block(method, draft_vocab, seed=9)
                drafter.load(model.state_dict(), 1)
            depth = depths[stage]
            noise = randn(3, depth, VOCAB, seed=stage).float()
            context = context_of([row[:n] for row, n in zip(rows, lengths, strict=True)], params)
            tree = drafter.propose(context, Strategy("learned", depth, 1, depth), Given(noise)).tree
            for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                scale = 1 / (params[slot].temperature or 1.0)
                expected = plain_chain(model, row[:length], captured[slot], noise[slot], drafter.tau, scale)
                assert tree.tokens_BN[slot].tolist() == [row[length - 1], *expected]


@forms
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 2, 6), (4, 3, 9), (3, 4, 12)])
def test_trees_are_those_of_the_best_of_every_slot_behind_the_best_paths(
    method: Method, draft_vocab: int | None, shape: tuple[int, int, int]
) -> None:
    model, strategy = make_block(method, draft_vocab), Strategy("learned", *shape)
    drafter, rows = make_drafter(model), [random_tokens(n, n) for n in (7, 12, 3)]
    captured = [captured_of(model.config, row) for row in rows]
    noise = randn(3, strategy.depth, VOCAB, seed=6).float()
    for slot, row in enumerate(rows):
        drafter.admit(slot, make_request(row))
        remember(drafter, slot, captured[slot], 0, len(row) - 1)
    tree = drafter.propose(context_of(rows), strategy, Given(noise)).tree
    for slot, row in enumerate(rows):
        paths: list[tuple[int, ...]] = [()]
        nodes = zip(tree.tokens_BN[slot, 1:].tolist(), tree.parents_BN[slot, 1:].tolist(), strict=True)
        for token, parent in nodes:
            paths.append((*paths[parent], token))
        expected = plain_tree(model, row, captured[slot], strategy, noise[slot], drafter.tau)
        assert set(paths[1:]) == expected
        assert len(paths) == len(expected) + 1


def test_a_short_memory_drafts_from_what_it_still_knows() -> None:
    """As if the sequence had begun where the window does; positions stay absolute."""
    model, window, row = make_block("dspark"), 10, random_tokens(30, 1)
    captured = captured_of(model.config, row)
    drafter, strategy = make_drafter(model, window=window), Strategy("learned", 4, 1, 4)
    drafter.admit(0, make_request(row[:2]))
    remember(drafter, 0, captured, 0, 29)
    noise = randn(1, 4, VOCAB, seed=3).float()
    tree = drafter.propose(context_of([row]), strategy, Given(noise)).tree
    # a rotation depends on differences of positions alone, so the window may as well begin at 0
    expected = plain_chain(model, row[19:], captured[19:], noise[0], drafter.tau, 1.0)
    assert tree.tokens_BN[0, 1:].tolist() == expected


def test_no_more_is_drafted_than_the_block_has_slots() -> None:
    model, row = make_block("dflash"), random_tokens(9, 1)
    for strategy in (Strategy("learned", 11, 1, 11), Strategy("learned", 11, 2, 20)):
        drafter = make_drafter(model)
        drafter.admit(0, make_request(row[:2]))
        remember(drafter, 0, captured_of(model.config, row), 0, 8)
        noise = randn(1, 12, VOCAB, seed=3).float()
        tree = drafter.propose(context_of([row]), strategy, Given(noise)).tree
        depths = [0]
        for parent in tree.parents_BN[0, 1:].tolist():
            depths.append(depths[parent] + 1)
        assert max(depths) == NUM_DRAFTED


def test_one_pass_fills_as_many_slots_as_are_drafted_and_the_context_is_made_once_per_token() -> None:
    model, row = make_block("dspark"), random_tokens(20, 1)
    captured, drafter, read, passes = captured_of(model.config, row), make_drafter(model), [], []
    assert isinstance(drafter.model, PackedBlock)
    context, forward = drafter.model.context, drafter.model.forward
    with (
        patch.object(drafter.model, "context", lambda c, p: (read.append(len(c)), context(c, p))[1]),
        patch.object(drafter.model, "forward", lambda e, *r: (passes.append(len(e)), forward(e, *r))[1]),
    ):
        drafter.admit(0, make_request(row[:9]))
        for known, length, depth in ((0, 9, 4), (8, 10, 2), (9, 14, 11)):
            remember(drafter, 0, captured, known, length - 1)
            noise, strategy = randn(1, 5, VOCAB).float(), Strategy("learned", depth, 2, 11)
            drafter.propose(context_of([row[:length]]), strategy, Given(noise))
    assert read == [8, 1, 4]
    assert passes == [4, 2, 4]


# ── what fails in silence elsewhere ─────────────────────────────────────────────────────────────────────────
