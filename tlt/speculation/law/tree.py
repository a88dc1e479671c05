"""Draft trees: depths, ancestors, and the attention mask with which the target reads them in one forward.

root ─┬─ a ─┬─ c          tokens   root a b c d
      │     └─ d          parents   -1 0 0 1 1
      └─ b                depths     0 1 1 2 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.base.types import DraftTree
from tlt.base.uploads import upload


def chain(tokens_BN: Tensor, lengths: Sequence[int] | None = None) -> DraftTree:
    """Returns a tree of width 1: column i follows column i - 1.

    lengths: nodes of each row, the root included, before padding; None: all columns.
    """
    if lengths is not None:
        tokens_BN = tokens_BN[:, : max(lengths)]
    num_nodes = tokens_BN.shape[1]
    parents_BN = torch.arange(-1, num_nodes - 1, device=tokens_BN.device).expand_as(tokens_BN)
    if lengths is None or min(lengths) == num_nodes:
        return DraftTree(tokens_BN, parents_BN, is_chain=True)
    is_padding_BN = parents_BN + 1 >= upload(lengths, tokens_BN.device)[:, None]
    return DraftTree(
        tokens_BN, parents_BN.masked_fill(is_padding_BN, -1), is_chain=True, lengths=tuple(lengths)
    )


def ancestors(parents_BN: Tensor) -> Tensor:
    """Returns bool[B, N, N]: whether node j is node i or an ancestor of it. Padding sees only itself.

    Squares the relation "self or parent": after k squarings it reaches 2ᵏ steps.
    """
    num_nodes = parents_BN.shape[1]
    nodes_N = torch.arange(num_nodes, device=parents_BN.device)
    reach = ((parents_BN[:, :, None] == nodes_N) | (nodes_N[:, None] == nodes_N)).float()
    for _ in range(max(num_nodes - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def tree_mask(seen_BNC: Tensor, prefix_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask [B, N, length]: a node sees its sequence's prefix and, of the C draft columns
    behind it, those marked in `seen_BNC`."""
    _, num_nodes, num_columns = seen_BNC.shape
    columns_L = torch.arange(length, device=prefix_B.device)
    offset_BL = columns_L - prefix_B[:, None]
    is_draft_BL = (offset_BL >= 0) & (offset_BL < num_columns)
    index_BNL = offset_BL.clamp(0, num_columns - 1)[:, None].expand(-1, num_nodes, -1)
    visible = (offset_BL < 0)[:, None] | (is_draft_BL[:, None] & seen_BNC.gather(2, index_BNL))
    return torch.zeros(visible.shape, dtype=dtype, device=prefix_B.device).masked_fill_(
        ~visible, float("-inf")
    )


def chain_mask(columns_BN: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """As `tree_mask`, for chains at these columns: a node sees all columns up to its own."""
    hidden = torch.arange(length, device=columns_BN.device) > columns_BN[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=columns_BN.device).masked_fill_(
        hidden, float("-inf")
    )


@dataclass(frozen=True)
class TreeLayout:
    """The cache columns of the nodes of B trees, and what each node sees.

    columns_BN: behind the prefix of committed tokens.
    depths_BN: 0 at the root; None for chains, where column i has depth i.
    mask_BNL: additive, over the first `length` columns; None: every node sees all.
    lengths: by row, columns that its nodes may see.
    counts: by row, nodes without padding; None: unknown to the host.
    """

    columns_BN: Tensor
    depths_BN: Tensor | None
    mask_BNL: Tensor | None
    length: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None

    @property
    def positions_BN(self) -> Tensor:
        return self.columns_BN if self.depths_BN is None else self.columns_BN[:, :1] + self.depths_BN


def layout(
    tree: DraftTree, prefixes: Sequence[int], dtype: torch.dtype, length: int | None = None
) -> TreeLayout:
    """Places trees behind sequences of `prefixes[b]` cached tokens. length: columns to read; None: those that
    are needed."""
    num_nodes, is_padded = tree.num_nodes, length is not None
    length = max(prefixes) + num_nodes if length is None else length
    lengths = tuple(prefix + count for prefix, count in zip(prefixes, tree.row_lengths, strict=True))
    prefix_B = upload(prefixes, tree.tokens_BN.device)
    columns_BN, depths_BN, mask_BNL = prefix_B[:, None], None, None
    if num_nodes > 1:
        columns_BN = columns_BN + torch.arange(num_nodes, device=prefix_B.device)
    if not tree.is_chain and num_nodes > 1:
        seen_BNN = ancestors(tree.parents_BN)
        depths_BN = seen_BNN.sum(dim=-1) - 1
        mask_BNL = tree_mask(seen_BNN, prefix_B, length, dtype)
    elif num_nodes > 1 or min(prefixes) != max(prefixes) or is_padded:
        mask_BNL = chain_mask(columns_BN, length, dtype)
    return TreeLayout(columns_BN, depths_BN, mask_BNL, length, lengths, tree.lengths)
