"""The decoder against Hugging Face's models: logits, gradients, generation, packed batches, caches and draft
trees; and the engine's copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.models.transformer_parts import (
    CASES,
    EXACT,
    PROMPTS,
    VOCAB,
    decode,
    generate_greedily,
    our_config,
    packed,
    packed_logits,
    prefill,
    referee,
    referee_logits,
    stale_cache,
    trainable,
)
from tlt.models import attention
from tlt.models.attention import Cached, PackedCausal
from tlt.models.decoder import Linear, ModelConfig, Transformer
from tlt.models.packed import PackedTransformer
from tlt.models.rope import MOST_TABLED, Llama3, Rope, Scaling, Yarn, rope_frequencies
from tlt.speculation.law.tree import chain_mask


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_both_transformers_give_the_logits_of_hugging_face(case: str, dtype: torch.dtype) -> None:
    model = referee(case, dtype)
    sequence = [i * 37 % VOCAB for i in range(100)]
    expected = referee_logits(model, sequence)
    assert expected.std() > 0.5
    for ours in (trainable(model), packed(model)):
        torch.testing.assert_close(packed_logits(ours, [sequence]), expected, atol=EXACT[dtype], rtol=0)


def test_gradients_are_those_of_hugging_face(case: str) -> None:
    model = referee(case, torch.float64)
    ours = trainable(model)
    sequence = torch.tensor(PROMPTS[2])
    F.cross_entropy(referee_logits(model, sequence.tolist())[:-1], sequence[1:]).backward()
    F.cross_entropy(packed_logits(ours, [sequence.tolist()])[:-1], sequence[1:]).backward()
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            expected[name].grad,
            atol=1e-10,
            rtol=1e-8,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@torch.no_grad()
def test_greedy_decoding_from_the_cache_generates_what_hugging_face_generates(case: str) -> None:
    model = referee(case, torch.float32)
    num_tokens = 24
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > 8  # no constant loop
    assert generate_greedily(packed(model), PROMPTS, num_tokens) == expected


@torch.no_grad()
def test_in_bfloat16_the_packed_transformer_is_as_close_to_float32_as_hugging_face_is(case: str) -> None:
    exact = referee_logits(referee(case, torch.float32), PROMPTS[2])
    rounded = referee_logits(referee(case, torch.bfloat16), PROMPTS[2]).float()
    ours = packed_logits(packed(referee(case, torch.float32), torch.bfloat16), [PROMPTS[2]])
    assert ours.dtype == torch.bfloat16
    error, allowed = (ours.float() - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error < 0.05
    assert error < 1.5 * allowed


def test_initialization_depends_on_the_seed_alone() -> None:
    config = our_config(CASES["qwen2-gqa2"])
    first, again, other = (
        dict(Transformer(config).initialize(seed).named_parameters()) for seed in (1, 1, 2)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name


# ── attention over a cache ──────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_one_forward_over_a_tree_equals_decoding_each_of_its_paths(case: str, seed: int) -> None:
    model = referee(case, torch.float64)
    ours = packed(model)
    num_nodes, B, longest = 11, len(PROMPTS), max(map(len, PROMPTS))
    generator = torch.Generator().manual_seed(seed)
    tokens_BN = torch.randint(VOCAB, (B, num_nodes), generator=generator)
    parents_BN = [
        [-1] + [int(torch.randint(n, (), generator=generator)) for n in range(1, num_nodes)] for _ in range(B)
    ]
    paths_BN = [[path_to(parents, node) for node in range(num_nodes)] for parents in parents_BN]

    # Nodes lie behind the prompt, in the order of their columns; each sees the prompt and its own path.
    prompt_lengths_B1 = torch.tensor([len(prompt) for prompt in PROMPTS])[:, None]
    columns_BN = prompt_lengths_B1 + torch.arange(num_nodes)
    positions_BN = prompt_lengths_B1 + torch.tensor([[len(path) - 1 for path in paths] for paths in paths_BN])
    length = longest + num_nodes
    mask_BNL = torch.full((B, num_nodes, length), float("-inf"), dtype=torch.float64)
    for b, prompt in enumerate(PROMPTS):
        mask_BNL[b, :, : len(prompt)] = 0
        for node, path in enumerate(paths_BN[b]):
            mask_BNL[b, node, [len(prompt) + column for column in path]] = 0
    cache = stale_cache(ours.config, B, length, torch.float64)
    prefill(ours, PROMPTS, cache)
    attend = Cached(ours.config, cache, columns_BN, length, mask_BNL)
    verified_BNV = ours.logits(ours.forward(tokens_BN.flatten(), positions_BN.flatten(), attend)).unflatten(
        0, (B, num_nodes)
    )

    for b, prompt in enumerate(PROMPTS):
        for node in (
            node for node in range(num_nodes) if node not in parents_BN[b]
        ):  # the leaves cover all nodes
            path, cache_of_path = paths_BN[b][node], stale_cache(ours.config, 1, length, torch.float64)
            prefill(ours, [prompt], cache_of_path)
            for depth, column in enumerate(path):
                sequential = decode(
                    ours, tokens_BN[b, column, None], torch.tensor([len(prompt) + depth]), cache_of_path
                )
                torch.testing.assert_close(verified_BNV[b, column], sequential[0], atol=1e-10, rtol=0)
            expected = referee_logits(model, [*prompt, *tokens_BN[b, path].tolist()])[len(prompt) :]
            torch.testing.assert_close(verified_BNV[b, path], expected, atol=1e-10, rtol=0)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Columns from the root to the node, both included."""
    return [node] if node == 0 else [*path_to(parents, parents[node]), node]


@pytest.mark.parametrize("counts", [None, [1, 4, 2, 5, 3]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_batch_whose_mask_is_too_large_to_repeat_attends_in_parts_to_the_same(
    kv_heads: int, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, starts, num_new = ModelConfig("llama", VOCAB, 32, 48, 1, 4, kv_heads, 8), [7, 0, 20, 3, 11], 5
    columns_BT = torch.tensor(starts)[:, None] + torch.arange(num_new)
    length, group = 25, 4 // kv_heads
    mask = chain_mask(columns_BT, length, torch.float64)
    num_tokens = sum(counts) if counts else 5 * num_new
    qkv_NSD = torch.randn(num_tokens, config.num_qkv, config.head_dim, dtype=torch.float64)
    kept_SKLD = torch.randn(5, 2 * kv_heads, length, config.head_dim, dtype=torch.float64)
    seen: list[int] = []
    attend = F.scaled_dot_product_attention

    def watched(*args: Tensor, attn_mask: Tensor, scale: float | None) -> Tensor:
        seen.append(attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)

    def attended(most: int) -> Tensor:
        monkeypatch.setattr(attention, "MASK_ENTRIES", most)
        cache = [kept_SKLD.clone()]
        return Cached(config, cache, columns_BT, length, mask, counts)(0, qkv_NSD)

    whole = attended(5 * mask[0].numel() * group)
    assert seen == [5 * mask[0].numel() * group]
    for most in (2 * mask[0].numel() * group, 1):
        seen.clear()
        torch.testing.assert_close(attended(most), whole, rtol=0, atol=1e-12)
        assert group == 1 or max(seen) <= max(most, mask[0].numel() * group)


def test_where_a_gpu_takes_no_grouped_heads_each_query_head_gets_a_key_of_its_own_and_the_result_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8)
    qkv_NSD = torch.randn(11, config.num_qkv, config.head_dim, dtype=torch.float64)
    grouped = PackedCausal(config, [4, 7])(0, qkv_NSD)
    seen: list[bool] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, enable_gqa: bool, **options: bool) -> torch.Tensor:
        seen.append(enable_gqa or len({tensor.shape[1] for tensor in tensors}) > 1)
        return plain(*tensors, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "takes_no_groups", lambda q: True)
    torch.testing.assert_close(PackedCausal(config, [4, 7])(0, qkv_NSD), grouped, rtol=0, atol=1e-12)
    assert seen == [False, False]


# ── the engine's copy, and the CPU's kernels ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_trainable_linear_and_its_gradients_are_those_of_torch(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    ours = Linear(40, 96, bias=has_bias)
    theirs = nn.Linear(40, 96, bias=has_bias).double()
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(rows, 40)
    x, y = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    weights = torch.randn(rows, 96)
    (ours(x) * weights).sum().backward()
    (theirs(y) * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-3)


def test_a_model_is_packed_for_its_own_device_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        ours = PackedTransformer(our_config(CASES["llama"]), torch.float32, "cpu")
    assert ours.rope.table is not None
    assert ours.rope.table[0].device.type == "cpu"


@torch.no_grad()
def test_a_packed_transformer_reports_its_version_and_refuses_a_policy_with_a_tensor_missing(
    case: str,
) -> None:
    model = referee(case, torch.float32)
    tensors = dict(model.named_parameters())
    ours = PackedTransformer(our_config(model.config), torch.float32)
    assert ours.version == -1
    for name in tensors:
        with pytest.raises(KeyError, match=name):
            ours.load({other: tensor for other, tensor in tensors.items() if other != name}, version=3)
    ours.load(tensors, version=4)
    assert ours.version == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scaling", [None, Llama3(8.0, 1.0, 4.0, 8192), Yarn(4.0, 8192)], ids=["plain", "llama3", "yarn"]
)
def test_a_long_window_has_the_same_positions_and_keeps_none(
    scaling: Scaling | None, dtype: torch.dtype
) -> None:
    short = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 64, rope_scaling=scaling, max_positions=MOST_TABLED)
    known, cpu = Rope(short, dtype, torch.device("cpu")), torch.device("cpu")
    for window in (MOST_TABLED + 1, 131_072, 1_010_000):
        rope = Rope(replace(short, max_positions=window), dtype, cpu)
        assert rope.table is None
        positions_N = torch.tensor([0, 1, 7, 4095, MOST_TABLED - 1, 3, 3])
        for a, b in zip(known.at(positions_N), rope.at(positions_N), strict=True):
            assert a.dtype == b.dtype == dtype
            assert torch.equal(a, b)
        cos_N1D, sin_N1D = rope.at(torch.tensor([window - 1]))
        frequencies_H, factor = rope_frequencies(short)
        angles_H = (window - 1) * frequencies_H
        assert torch.equal(cos_N1D[0, 0, :32], (factor * angles_H.cos()).to(dtype))
        assert torch.equal(sin_N1D[0, 0, 32:], (factor * angles_H.sin()).to(dtype))
