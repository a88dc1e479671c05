"""A chain in one call of compiled loops is the chain that is drafted level by level with PyTorch's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.drafter.parts import make_request, random_tokens
from tlt.base.strategy import Strategy
from tlt.base.types import SamplingParams
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.drafting.learned.pair_cache import PairCache
from tlt.drafter.eagle import EagleModel, PackedEagle
from tlt.drafter.protocol import DraftContext
from tlt.drafter.shape import EagleShape, Method, drafter_shape
from tlt.engine.own.noise import BatchLaw, StepNoise
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.params import BatchParams

compiled_layers = pytest.importorskip(
    "tlt.models.loops.layers", reason="Numba is not installed: PyTorch computes"
)

CONFIG = ModelConfig("llama", 1100, 64, 96, 4, 4, 2, 16, max_positions=96)
FORMS: list[tuple[Method, bool, bool]] = [
    ("eagle", False, True),
    ("eagle", False, False),
    ("eagle3", False, False),
    ("eagle3", True, True),
]
"""Method, norm_before_residual and whether fc has a bias."""
DEPTH = 5
STRATEGY = Strategy("learned", DEPTH, 1, DEPTH)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
PARAMS = [SamplingParams(temperature=t) for t in (1.0, 0.6, 0.0, 1.4)]
FEW = [[30, 9, 91, 2], [1, 4, 2, 3], [6, 6, 6, 6], [1, 1, 1, 1]]
"""Committed tokens, by step and sequence."""
MANY = [*FEW, [19, 1, 1, 2], [2, 1, 1, 2]]
"""The first sequence misses more than is read in one call; the third comes to the end of the window."""


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def target_of(dtype: torch.dtype) -> PackedTransformer:
    target = PackedTransformer(CONFIG, dtype)
    target.load(dict(Transformer(CONFIG).initialize(0, 0.2).named_parameters()), 0)
    return target


def drafter_of(
    form: tuple[Method, bool, bool], target: PackedTransformer, num_draft: int | None = None
) -> LearnedDrafter:
    method, is_normed, has_bias = form
    shape = drafter_shape(CONFIG, method)
    assert isinstance(shape, EagleShape)
    shape = replace(shape, norm_before_residual=is_normed, has_bias=has_bias)
    model = EagleModel(shape)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=index) * 0.1 + (parameter.dim() == 1))
    packed = PackedEagle(shape, target.dtype)
    packed.load(model.state_dict(), 0)
    if num_draft is not None:
        packed.choose(torch.arange(num_draft) * CONFIG.vocab_size // num_draft)
    return LearnedDrafter(packed, target, 4, LearnedSettings(window=64))


def level_by_level(drafter: LearnedDrafter) -> LearnedDrafter:
    assert isinstance(drafter.draft_cache, PairCache)
    assert drafter.draft_cache.chain is not None
    drafter.draft_cache.chain = None
    return drafter


def steps(
    drafters: Sequence[LearnedDrafter], growth: Sequence[Sequence[int]] = MANY, rows: Sequence[int] = range(4)
) -> Iterator[tuple[DraftContext, StepNoise]]:
    """Before each one, every drafter is told of the new tokens' features."""
    texts = [random_tokens(200, seed=row) for row in rows]
    size = CONFIG.hidden_size * len(drafters[0].capture)
    features = [randn(200, size, seed=row).to(drafters[0].model.dtype) for row in rows]
    lengths = [0 for _ in rows]
    for drafter in drafters:
        for slot, text in enumerate(texts):
            drafter.admit(slot, make_request(text[:1]))
    for step in growth:
        for slot, row in enumerate(rows):
            before = max(lengths[slot] - 1, 0)
            lengths[slot] += step[row]
            for drafter in drafters:
                drafter.remember([slot], [before], features[slot][None, before : lengths[slot] - 1])
        tokens = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        params = [PARAMS[row] for row in rows]
        requests = [
            make_request(text[:2], f"p{row}", PARAMS[row]) for text, row in zip(tokens, rows, strict=True)
        ]
        context = DraftContext(tokens, requests, BatchParams.of(params), torch.device("cpu"))
        law = BatchLaw.of(context.requests, context.device)
        yield context, StepNoise(law, [*lengths], CONFIG.vocab_size)


@pytest.mark.parametrize("num_draft", [None, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.inference_mode()
def test_every_token_has_the_best_score_level_by_level(
    form: tuple[Method, bool, bool], dtype: torch.dtype, num_draft: int | None
) -> None:
    target = target_of(dtype)
    ours, theirs = drafter_of(form, target, num_draft), level_by_level(drafter_of(form, target, num_draft))
    for context, noise in steps([ours, theirs]):
        tokens_BN = ours.propose(context, STRATEGY, noise).tree.tokens_BN
        token_ids_V = (
            torch.arange(CONFIG.vocab_size) if ours.model.token_ids is None else ours.model.token_ids
        )
        chosen_BD = torch.searchsorted(token_ids_V, tokens_BN[:, 1:].contiguous())
        levels = theirs.draft_cache.begin(context, STRATEGY, tokens_BN[:, :1])
        for level in range(DEPTH):
            logits_B1V = levels.next(tokens_BN[:, level : level + 1], None) if level else levels.first()
            noise_BV = noise.of_level(level, theirs.model.token_ids)
            scores_BV = theirs._rank(context.params.scale(logits_B1V), noise_BV)[:, 0]
            behind_B = scores_BV.amax(-1) - scores_BV.gather(1, chosen_BD[:, level : level + 1])[:, 0]
            assert behind_B.max() < TOLERANCE[dtype]
    (one,), (other,) = ours.draft_cache.cache.layers, theirs.draft_cache.cache.layers
    for slot, count in enumerate(ours.draft_cache.counts):
        torch.testing.assert_close(
            one[slot, :, :count], other[slot, :, :count], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize(("num_draft", "is_tabled"), [(None, False), (160, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
@torch.inference_mode()
def test_eagles_tokens_guesses_and_cache_are_those_of_level_by_level_to_the_bit(
    form: tuple[Method, bool, bool], dtype: torch.dtype, num_draft: int | None, is_tabled: bool
) -> None:
    target = target_of(dtype)
    ours, theirs = drafter_of(form, target, num_draft), level_by_level(drafter_of(form, target, num_draft))
    if not is_tabled:  # of a window too long for tables
        ours.model.rope.table = theirs.model.rope.table = None
    num_judged = 0
    for context, noise in steps([ours, theirs], FEW + 3 * FEW[1:]):
        one, other = (drafter.propose(context, STRATEGY, noise) for drafter in (ours, theirs))
        assert one.tree.is_chain
        assert one.tree.tokens_BN.tolist() == other.tree.tokens_BN.tolist()
        assert (one.guesses_BK is None) == (other.guesses_BK is None)
        if one.guesses_BK is not None and other.guesses_BK is not None:
            num_judged += 1
            assert one.guesses_BK.tolist() == other.guesses_BK.tolist()
    assert num_judged == 1
    (one_layer,), (other_layer,) = ours.draft_cache.cache.layers, theirs.draft_cache.cache.layers
    for slot, count in enumerate(ours.draft_cache.counts):
        assert torch.equal(one_layer[slot, :, :count], other_layer[slot, :, :count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_neither_threads_nor_company_change_a_draft(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(dtype)

    def drafted(rows: Sequence[int] = range(4)) -> list[list[list[int]]]:
        drafter = drafter_of(FORMS[3], target)
        found = steps([drafter], FEW, rows)
        return [drafter.propose(*one[:1], STRATEGY, one[1]).tree.tokens_BN.tolist() for one in found]

    together = drafted()
    for row in range(4):
        assert drafted([row]) == [[tokens[row]] for tokens in together]
    monkeypatch.setattr(compiled_layers, "PRODUCTS_PER_THREAD", 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for _ in range(10):
            assert drafted() == together
    finally:
        torch.set_num_threads(threads)
