"""Ways to compute a text's tokens, which must not change a bit of any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.threads import computing_by
from tlt.base.types import DraftTree
from tlt.models.attention import SharedPrompts, cached, cached_trees, storing_prefill
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.tree import chain_mask, layout

compiled = pytest.importorskip("tlt.models.loops.attention", reason="Numba is not installed: SDPA attends")

LENGTH, PROMPT = 150, 70
TEXT = torch.randint(40, (LENGTH,), generator=torch.Generator().manual_seed(3))
OTHERS = torch.randint(40, (3, 40), generator=torch.Generator().manual_seed(4))

Way = Callable[[PackedTransformer], tuple[Tensor, Tensor]]
"""Returns the features of TEXT, [T, E], and its keys and values in the last layer, [2K, T, D]."""


def empty(target: PackedTransformer, num_slots: int) -> list[Tensor]:
    c = target.config
    shape = (c.num_layers, num_slots, 2 * c.num_kv_heads, 192, c.head_dim)
    return list(torch.zeros(shape, dtype=target.dtype))


def in_steps_of(num: int, company: int = 0) -> Way:
    """company: other sequences in the batch, of another text."""

    def way(target: PackedTransformer) -> tuple[Tensor, Tensor]:
        layers, parts = empty(target, 1 + company), []
        for first in range(0, LENGTH, num):
            end = min(first + num, LENGTH)
            columns_BT = torch.arange(first, end).repeat(1 + company, 1)
            tokens_BT = torch.stack([TEXT, *[TEXT.flip(0)] * company])[:, first:end]
            attend = cached(target.config, layers, columns_BT, end, chain_mask(columns_BT, end, target.dtype))
            features_NE, _ = target.forward_capturing(tokens_BT.flatten(), columns_BT.flatten(), attend, ())
            parts.append(features_NE[: end - first])
        return torch.cat(parts), layers[-1][0, :, :LENGTH]

    return way


def as_a_prompt(target: PackedTransformer) -> tuple[Tensor, Tensor]:
    layers = empty(target, 2)
    attend = storing_prefill(target.config, [(LENGTH, [0])], layers, [1])
    features_TE, _ = target.forward_capturing(TEXT, attend.positions(), attend, ())
    return features_TE, layers[-1][1, :, :LENGTH]


def beside_others_with_its_prompt(target: PackedTransformer) -> tuple[Tensor, Tensor]:
    """The text is the second of three with a common prompt, after a text of its own kind."""
    layers, own = empty(target, 4), LENGTH - PROMPT
    attend = storing_prefill(target.config, [(20, [20]), (PROMPT, [40, own, 7])], layers, [3, 2, 0, 1])
    tokens_N = torch.cat([OTHERS[0], TEXT[:PROMPT], OTHERS[1], TEXT[PROMPT:], OTHERS[2][:7]])
    features_NE, _ = target.forward_capturing(tokens_N, attend.positions(), attend, ())
    start = 40 + PROMPT
    mine = torch.cat([features_NE[40:start], features_NE[start + 40 : start + 40 + own]])
    return mine, layers[-1][0, :, :LENGTH]


def in_a_packed_update(target: PackedTransformer) -> tuple[Tensor, Tensor]:
    families, c, own = [(PROMPT, [11, LENGTH - PROMPT]), (0, [40])], target.config, LENGTH - PROMPT
    numbers = torch.zeros((2 * PROMPT + 11 + own + 40) * 2 * c.num_kv_heads * c.head_dim, dtype=target.dtype)
    attend = compiled.Packed(c, families, [numbers] * c.num_layers, None)
    assert torch.equal(attend.positions(), SharedPrompts(c, families).positions())
    tokens_N = torch.cat([TEXT[:PROMPT], OTHERS[0][:11], TEXT[PROMPT:], OTHERS[1]])
    features_NE, _ = target.forward_capturing(tokens_N, attend.positions(), attend, ())
    before = (PROMPT + 11) * 2 * c.num_kv_heads * c.head_dim
    kept = numbers[before:][: LENGTH * 2 * c.num_kv_heads * c.head_dim].view(-1, LENGTH, c.head_dim)
    return torch.cat([features_NE[:PROMPT], features_NE[PROMPT + 11 : PROMPT + 11 + own]]), kept


def in_a_tree(target: PackedTransformer) -> tuple[Tensor, Tensor]:
    """The last 20 tokens are the even nodes of a tree; its odd ones are wrong drafts."""
    layers, prefix = empty(target, 1), LENGTH - 20
    attend = storing_prefill(target.config, [(prefix, [0])], layers, [0])
    first_NE, _ = target.forward_capturing(TEXT[:prefix], attend.positions(), attend, ())
    parents_1N = torch.tensor([[-1, *((node - 1) // 2 * 2 for node in range(1, 40))]])
    tokens_1N = torch.stack([TEXT[prefix:], OTHERS[0][:20]], dim=1).view(1, -1)
    nodes = layout(DraftTree(tokens_1N, parents_1N), [prefix], target.dtype)
    attend = cached_trees(target.config, layers, nodes)
    features_NE, _ = target.forward_capturing(tokens_1N[0], nodes.positions_BN[0], attend, ())
    kept = torch.cat([layers[-1][0, :, :prefix], layers[-1][0, :, prefix : prefix + 40 : 2]], dim=1)
    return torch.cat([first_NE, features_NE[::2]]), kept


WAYS: dict[str, Way] = {
    "chains of 5": in_steps_of(5),
    "a chain of 40": in_steps_of(40),
    "a token among 3": in_steps_of(1, company=2),
    "chains of 9 among 33": in_steps_of(9, company=32),
    "a prompt": as_a_prompt,
    "a shared prompt": beside_others_with_its_prompt,
    "the update": in_a_packed_update,
    "a tree": in_a_tree,
}


def by_a_thread(way: Way, target: PackedTransformer) -> tuple[Tensor, Tensor]:
    with computing_by(1):
        return way(target)
