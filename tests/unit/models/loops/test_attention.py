"""The compiled loops attend as PyTorch does over the same cache: chains, trees, ragged batches, groups of
heads, both dtypes.

What a query gets is its own to the last bit: whatever else is asked in the same call, and however many
threads ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tlt.base import loops
from tlt.models.attention import Cached, cached, real_tokens
from tlt.models.decoder import ModelConfig
from tlt.models.loops import available
from tlt.speculation.law.tree import chain_mask

items = pytest.importorskip("tlt.models.loops.items", reason="Numba is not installed: SDPA attends")
compiled = pytest.importorskip("tlt.models.loops.attention", reason="Numba is not installed: SDPA attends")

SHAPES = [(4, 2, 8), (3, 1, 64), (2, 2, 128), (7, 1, 20)]
"""Heads, key heads and head size: groups of 2, 3, 1 and 7; sizes that fill panels of 16, and that do not."""


def config_of(shape: tuple[int, int, int]) -> ModelConfig:
    heads, kv_heads, head_dim = shape
    return ModelConfig("llama", 24, 32, 64, 2, heads, kv_heads, head_dim, max_positions=512)


def new_tokens(config: ModelConfig, num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, config.num_qkv, config.head_dim, generator=generator).to(dtype)


def random_cache(
    config: ModelConfig, num_slots: int, length: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Layers full of numbers of size 1, of which what lies behind a sequence means nothing."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, num_slots, 2 * config.num_kv_heads, length, config.head_dim)
    return list(torch.randn(shape, generator=generator).to(dtype))


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of attention over numbers of size 1: some roundings of float32; in bfloat16 one of the result, and
SDPA's own."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "num_new"), [([60], 1), ([61, 2, 130, 64], 1), ([63, 2, 130, 11], 5), ([200], 16)]
)
def test_attention_and_cache_are_those_of_sdpa(
    lengths: list[int], num_new: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    config, B, length = config_of(shape), len(lengths), max(lengths) + num_new
    columns_BT = torch.tensor(lengths)[:, None] + torch.arange(num_new)
    mask = chain_mask(columns_BT, length, dtype)
    qkv_NSD, results = new_tokens(config, B * num_new, dtype), []
    for lengths_seen in (None, [n + num_new for n in lengths]):
        layers = random_cache(config, B, length + 3, dtype)
        attend = cached(config, layers, columns_BT, length, mask, lengths_seen)
        assert isinstance(attend, compiled.CompiledAttention)
        results.append((attend(1, qkv_NSD), layers))
    expected_layers = random_cache(config, B, length + 3, dtype)
    expected_NC = Cached(config, expected_layers, columns_BT, length, mask)(1, qkv_NSD)
    for out_NC, layers in results:
        torch.testing.assert_close(out_NC, expected_NC, atol=TOLERANCE[dtype], rtol=0)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(layers, expected_layers, strict=True))
    assert torch.equal(results[0][0], results[1][0]), "what no token sees changes nothing"


def test_rows_of_different_length_have_no_padding() -> None:
    config, lengths, counts, num_new = config_of((4, 2, 8)), [37, 2, 90, 11], [1, 4, 2, 5], 5
    length = max(lengths) + num_new
    columns_BT = torch.tensor(lengths)[:, None] + torch.arange(num_new)
    mask, qkv_NSD = chain_mask(columns_BT, length, torch.float32), new_tokens(config, 4 * num_new)
    real_N = real_tokens(counts, num_new, torch.device("cpu"))
    seen = [n + count for n, count in zip(lengths, counts, strict=True)]
    attend = cached(config, random_cache(config, 4, length), columns_BT, length, mask, seen, counts)
    assert isinstance(attend, compiled.CompiledAttention)
    assert attend.real_N is not None
    assert torch.equal(attend.real_N, real_N)
    padded = Cached(config, random_cache(config, 4, length), columns_BT, length, mask)
    torch.testing.assert_close(attend(0, qkv_NSD[real_N]), padded(0, qkv_NSD)[real_N], atol=1e-5, rtol=0)


def test_a_tree_sees_its_own_branches_alone() -> None:
    config, parents, prefix = config_of((4, 2, 8)), [-1, 0, 0, 1, 2, 2], 70
    columns_1T = prefix + torch.arange(len(parents))[None]
    mask_1TL = torch.full((1, len(parents), prefix + len(parents)), float("-inf"))
    mask_1TL[:, :, :prefix] = 0
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            mask_1TL[0, node, prefix + ancestor] = 0
            ancestor = parents[ancestor]
    arguments = (columns_1T, prefix + len(parents), mask_1TL)
    qkv_NSD = new_tokens(config, len(parents))
    ours = cached(config, random_cache(config, 1, 100), *arguments)(0, qkv_NSD)
    theirs = Cached(config, random_cache(config, 1, 100), *arguments)(0, qkv_NSD)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def outputs_of(
    config: ModelConfig, layers: Sequence[Tensor], lengths: Sequence[int], qkv_NSD: Tensor
) -> Tensor:
    """Attends with len(qkv) / len(lengths) new tokens of each sequence; returns [B, T, H·D]."""
    B, T = len(lengths), len(qkv_NSD) // len(lengths)
    columns_BT = torch.tensor(lengths)[:, None] + torch.arange(T)
    length = max(lengths) + T
    mask, seen = chain_mask(columns_BT, length, torch.float32), [n + T for n in lengths]
    return cached(config, layers, columns_BT, length, mask, seen)(0, qkv_NSD).view(B, T, -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_gets_the_same_bits_alone_in_a_draft_and_in_a_batch(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lengths, T = config_of(shape), [150, 33, 62], 4
    qkv_BTSD = new_tokens(config, len(lengths) * T).view(len(lengths), T, config.num_qkv, -1)
    together_BTC = outputs_of(config, random_cache(config, 3, 200), lengths, qkv_BTSD.flatten(0, 1))
    monkeypatch.setattr(compiled, "PRODUCTS_PER_THREAD", 10**12)  # one thread
    for b, length in enumerate(lengths):
        layers = [layer[b : b + 1].clone() for layer in random_cache(config, 3, 200)]
        one_by_one = [
            outputs_of(config, layers, [length + t], qkv_BTSD[b, t : t + 1])[0, 0] for t in range(T)
        ]
        assert torch.equal(torch.stack(one_by_one), together_BTC[b])


@pytest.mark.parametrize("has_openmp", [True, False])
def test_threads_change_no_bit(has_openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lengths = config_of((4, 2, 8)), [70] * 6
    qkv_NSD, outputs = new_tokens(config, 6), []
    if not has_openmp:
        monkeypatch.setattr(loops, "_gomp_parallel", lambda: None)
    num_threads = torch.get_num_threads()
    try:
        for threads, worth in ((1, 1), (3, 1), (3, 10**12)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(compiled, "PRODUCTS_PER_THREAD", worth)
            outputs.append(outputs_of(config, random_cache(config, 6, 80), lengths, qkv_NSD))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


def test_scores_that_differ_widely_neither_overflow_nor_vanish() -> None:
    config, length = config_of((2, 1, 8)), 200
    layers = random_cache(config, 1, length)
    layers[0] *= 300  # scores of some thousands: all weight is on one key, in whatever block
    qkv_NSD = new_tokens(config, 1) * 30
    arguments = (torch.tensor([[length - 1]]), length, None)
    ours = cached(config, [layer.clone() for layer in layers], *arguments)(0, qkv_NSD)
    theirs = Cached(config, [layer.double() for layer in layers], *arguments)(0, qkv_NSD.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_float64_and_machines_without_numba_are_left_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of((4, 2, 8))

    def attend(num_new: int, dtype: torch.dtype) -> object:
        columns_1T = 10 + torch.arange(num_new)[None]
        return cached(config, random_cache(config, 1, 400, dtype), columns_1T, 10 + num_new, None)

    assert isinstance(attend(1, torch.float64), Cached)
    assert isinstance(attend(200, torch.float32), compiled.CompiledAttention)
    monkeypatch.setitem(sys.modules, "numba", None)
    available.load.cache_clear()
    assert isinstance(attend(1, torch.float32), Cached)
    monkeypatch.undo()
    available.load.cache_clear()
    assert not isinstance(attend(1, torch.float32), Cached)


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_a_soft_cap_is_as_exact_above_zero_as_below(softcap: float) -> None:
    scores = torch.linspace(-200, 200, items._KEYS)
    expected = softcap * torch.tanh(scores.double() / softcap)
    found = scores.numpy().copy()
    items._cap(found, 1, np.float32(softcap))
    assert (torch.from_numpy(found) - expected).abs().max() < 4e-7 * softcap
