"""Draft trees: depths, ancestors, and the attention mask with which the target reads them in one forward.

root ─┬─ a ─┬─ c          tokens   root a b c d
      │     └─ d          parents   -1 0 0 1 1
      └─ b                depths     0 1 1 2 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    parents_BN: None for chains, where column i follows column i - 1.
    length: columns to read.
    lengths: by row, columns that its nodes may see.
    counts: by row, nodes without padding; None: unknown to the host.
    """

    columns_BN: Tensor
    parents_BN: Tensor | None
    length: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None
    dtype: torch.dtype
    sees_all: bool
    """Whether every node sees the first `length` columns."""

    @cached_property
    def _seen_BNN(self) -> Tensor:
        assert self.parents_BN is not None
        return ancestors(self.parents_BN)

    @cached_property
    def positions_BN(self) -> Tensor:
        if self.parents_BN is None:
            return self.columns_BN
        return self.columns_BN[:, :1] + self._seen_BNN.sum(dim=-1) - 1

    @property
    def mask_BNL(self) -> Tensor | None:
        """Additive, over the first `length` columns; None: every node sees all."""
        if self.sees_all:
            return None
        if self.parents_BN is None:
            return chain_mask(self.columns_BN, self.length, self.dtype)
        return tree_mask(self._seen_BNN, self.columns_BN[:, 0], self.length, self.dtype)


def layout(
    tree: DraftTree, prefixes: Sequence[int], dtype: torch.dtype, length: int | None = None
) -> TreeLayout:
    """Places trees behind sequences of `prefixes[b]` cached tokens. length: columns to read; None: as
    needed."""
    num_nodes, is_padded = tree.num_nodes, length is not None
    length = max(prefixes) + num_nodes if length is None else length
    lengths = tuple(prefix + count for prefix, count in zip(prefixes, tree.row_lengths, strict=True))
    columns_BN = upload(prefixes, tree.tokens_BN.device)[:, None]
    if num_nodes > 1:
        columns_BN = columns_BN + torch.arange(num_nodes, device=columns_BN.device)
    parents_BN = None if tree.is_chain or num_nodes == 1 else tree.parents_BN
    sees_all = num_nodes == 1 and min(prefixes) == max(prefixes) and not is_padded
    return TreeLayout(columns_BN, parents_BN, length, lengths, tree.lengths, dtype, sees_all)
