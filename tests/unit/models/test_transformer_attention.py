"""Attention over a cache: with masks and without, over draft trees, and sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.unit.transformer_parts import (
    CASES,
    PROMPTS,
    VOCAB,
    decode,
    packed,
    prefill,
    referee,
    referee_logits,
    stale_cache,
)
from tlt.models import attention
from tlt.models.attention import Cached, PackedCausal
from tlt.models.decoder import ModelConfig


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_decoding_without_a_mask_equals_decoding_with_one() -> None:
    ours = packed(referee("qwen2-gqa2", torch.float64))
    prompts = [PROMPTS[2], PROMPTS[2][::-1]]
    cache = stale_cache(ours.config, 2, 12, torch.float64)
    prefill(ours, prompts, cache)
    lengths_B, tokens_B = torch.tensor([9, 9]), torch.tensor([3, 4])
    masked = decode(ours, tokens_B, lengths_B, cache)
    attend = Cached(ours.config, cache, lengths_B[:, None], 10, None)
    torch.testing.assert_close(
        ours.logits(ours.forward(tokens_B, lengths_B, attend)), masked, atol=1e-11, rtol=0
    )


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
