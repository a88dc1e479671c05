"""Draft trees: their depths, their ancestors, and who sees whom when the target reads them in one forward.

root ─┬─ a ─┬─ c          tokens   root a b c d
      │     └─ d          parents   -1 0 0 1 1
      └─ b                depths     0 1 1 2 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.types import DraftTree


def chain(tokens_BN: Tensor, lengths: Sequence[int] | None = None) -> DraftTree:
    """A tree of width 1: column i follows column i - 1. lengths: nodes of each row, the root included; the rest is padding."""
    if lengths is not None:
        tokens_BN = tokens_BN[:, : max(lengths)]
    num_nodes = tokens_BN.shape[1]
    parents_BN = torch.arange(-1, num_nodes - 1, device=tokens_BN.device).expand_as(tokens_BN)
    if lengths is None or min(lengths) == num_nodes:
        return DraftTree(tokens_BN, parents_BN, is_chain=True)
    is_padding_BN = parents_BN + 1 >= torch.tensor(lengths, device=tokens_BN.device)[:, None]
    return DraftTree(tokens_BN, parents_BN.masked_fill(is_padding_BN, -1), is_chain=True, lengths=tuple(lengths))


def ancestors(parents_BN: Tensor) -> Tensor:
    """bool[B, N, N]: whether node j is node i or an ancestor of it. Padding sees only itself.

    The closure of "self or parent" by squaring: after k squarings, everything up to 2ᵏ steps away.
    """
    num_nodes = parents_BN.shape[1]
    nodes_N = torch.arange(num_nodes, device=parents_BN.device)
    reach = ((parents_BN[:, :, None] == nodes_N) | (nodes_N[:, None] == nodes_N)).float()
    for _ in range(max(num_nodes - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def depths(parents_BN: Tensor) -> Tensor:
    """int64[B, N]: steps from the root. Padding counts as depth 0."""
    return ancestors(parents_BN).sum(dim=-1) - 1


def tree_mask(ancestors_BNN: Tensor, prefix_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, N, length] for nodes stored at columns prefix .. prefix + N - 1 of their sequence's cache:
    each node sees the prefix, its ancestors and itself."""
    num_nodes = ancestors_BNN.shape[1]
    columns_L = torch.arange(length, device=prefix_B.device)
    offset_BL = columns_L - prefix_B[:, None]
    is_node_BL = (offset_BL >= 0) & (offset_BL < num_nodes)
    index_BNL = offset_BL.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1)
    visible = (offset_BL < 0)[:, None] | (is_node_BL[:, None] & ancestors_BNN.gather(2, index_BNL))
    return torch.zeros(visible.shape, dtype=dtype, device=prefix_B.device).masked_fill_(~visible, float("-inf"))


def chain_mask(num_nodes: int, prefix_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """`tree_mask` of a chain: node i sees the columns up to prefix + i."""
    last_BN = prefix_B[:, None] + torch.arange(num_nodes, device=prefix_B.device)
    hidden = torch.arange(length, device=prefix_B.device) > last_BN[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=prefix_B.device).masked_fill_(hidden, float("-inf"))
