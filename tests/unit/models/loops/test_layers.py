"""All layers in one call compute what they do one operation at a time; and a row's bits are its own, whatever
rows, sequences or threads there are beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.models.transformer_parts import target_of
from tlt.base import loops as base_loops
from tlt.drafter.eagle import EagleModel, PackedEagle
from tlt.drafter.shape import EagleShape, Method, drafter_shape
from tlt.models.attention import Cached, cached
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.loops import available
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.tree import chain_mask

compiled = pytest.importorskip("tlt.models.loops.layers", reason="Numba is not installed: PyTorch computes")

CONFIGS = [
    ModelConfig("llama", 40, 64, 96, 4, 4, 2, 16, max_positions=256),
    ModelConfig("qwen2", 40, 48, 80, 2, 4, 1, 24, max_positions=256),
    ModelConfig("qwen3", 40, 64, 112, 2, 2, 2, 64, max_positions=256),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}
LENGTHS, NUM_NEW = [30, 9, 61], 4
CAPTURES = [(), (2,), (0, 1, 4)]


def random_layers(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (config.num_layers, num_slots, 2 * config.num_kv_heads, 96, config.head_dim)
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype))


def forward(
    target: PackedTransformer,
    layers: list[Tensor],
    lengths: list[int],
    tokens_BT: Tensor,
    capture: tuple[int, ...] = (),
    in_one_call: bool = True,
) -> tuple[Tensor, Tensor]:
    B, T = tokens_BT.shape
    columns_BT = torch.tensor(lengths)[:, None] + torch.arange(T)
    length = max(lengths) + T
    mask, config = chain_mask(columns_BT, length, target.dtype), target.config
    if in_one_call:
        attend = cached(config, layers, columns_BT, length, mask, [n + T for n in lengths])
        assert target.compiled is not None
        assert target.compiled.serves(attend)
    else:
        attend = Cached(config, layers, columns_BT, length, mask)
    with torch.inference_mode():
        features, captured = target.forward_capturing(
            tokens_BT.flatten(), columns_BT.flatten(), attend, capture
        )
    return features.view(B, T, -1), captured.view(B, T, -1)


def tokens_of(config: ModelConfig) -> Tensor:
    return torch.randint(config.vocab_size, (3, NUM_NEW), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
@pytest.mark.parametrize("capture", CAPTURES)
def test_layers_captures_and_cache_are_those_of_one_operation_at_a_time(
    capture: tuple[int, ...], config: ModelConfig, dtype: torch.dtype
) -> None:
    capture = tuple(min(index, config.num_layers) for index in capture)
    target, found = target_of(config, dtype), []
    for in_one_call in (True, False):
        layers = random_layers(config, 3, dtype)
        found.append((*forward(target, layers, LENGTHS, tokens_of(config), capture, in_one_call), *layers))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
def test_a_row_has_the_same_bits_one_by_one_in_a_chain_and_in_a_batch(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    target, tokens_BT = target_of(config, dtype), tokens_of(config)
    layers = random_layers(config, 3, dtype)
    together, captured = forward(target, layers, LENGTHS, tokens_BT, (0, 1))
    for b, length in enumerate(LENGTHS):
        alone = [layer[b : b + 1].clone() for layer in random_layers(config, 3, dtype)]
        for t in range(NUM_NEW):
            row, kept = forward(target, alone, [length + t], tokens_BT[b : b + 1, t : t + 1], (0, 1))
            assert torch.equal(row[0, 0], together[b, t])
            assert torch.equal(kept[0, 0], captured[b, t])
        assert all(torch.equal(one[0], layer[b]) for one, layer in zip(alone, layers, strict=True))


@pytest.mark.parametrize("has_openmp", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit_and_wait_for_each_other(
    dtype: torch.dtype, has_openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tokens_BT = target_of(CONFIGS[0], dtype), tokens_of(CONFIGS[0])
    alone, _ = forward(target, random_layers(CONFIGS[0], 3, dtype), LENGTHS, tokens_BT)
    monkeypatch.setattr(compiled, "PRODUCTS_PER_THREAD", 1)
    if not has_openmp:
        monkeypatch.setattr(base_loops, "_gomp_parallel", lambda: None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for _ in range(20):
            found, _ = forward(target, random_layers(CONFIGS[0], 3, dtype), LENGTHS, tokens_BT)
            assert torch.equal(found, alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "broken",
    ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"],
)
def test_a_number_that_is_none_shows_in_every_row(broken: str) -> None:
    model = Transformer(CONFIGS[0]).initialize(0, 0.1)
    with torch.no_grad():
        model.get_parameter(broken).fill_(float("nan"))
    target = PackedTransformer(CONFIGS[0], torch.float32)
    target.load(dict(model.named_parameters()), 0)
    found, _ = forward(target, random_layers(CONFIGS[0], 3, torch.float32), LENGTHS, tokens_of(CONFIGS[0]))
    assert found.isnan().any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "is_normed"), [("eagle", False), ("eagle3", False), ("eagle3", True)])
def test_a_drafter_of_eagles_family_predicts_in_one_call_what_it_does_otherwise(
    method: Method, is_normed: bool, dtype: torch.dtype
) -> None:
    config = CONFIGS[0]
    shape = drafter_shape(config, method)
    assert isinstance(shape, EagleShape)
    shape = replace(shape, norm_before_residual=is_normed)
    model = EagleModel(shape).initialize(0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    drafter = PackedEagle(shape, dtype)
    drafter.load(model.state_dict(), 0)
    embeddings, hidden = (
        torch.randn(12, config.hidden_size, generator=generator).to(dtype) for _ in range(2)
    )
    columns_BT = torch.tensor(LENGTHS)[:, None] + torch.arange(NUM_NEW)
    length = max(LENGTHS) + NUM_NEW
    mask, found = chain_mask(columns_BT, length, dtype), []
    for kind in (cached, Cached):
        layers = random_layers(shape.layer, 3, dtype)
        attend = kind(shape.layer, layers, columns_BT, length, mask)
        assert drafter.compiled is not None
        assert drafter.compiled.serves(attend) == (kind is cached)
        with torch.inference_mode():
            found.append((drafter.forward(embeddings, hidden, columns_BT.flatten(), attend), *layers))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=0)


def test_matrices_whose_outputs_are_no_multiple_of_a_panel_run_one_operation_at_a_time() -> None:
    config = ModelConfig("llama", 40, 64, 90, 1, 4, 2, 16, max_positions=256)
    target = target_of(config, torch.float32)
    assert target.compiled is None
    assert available.has_panels(torch.float32, torch.device("cpu"))
