"""Selects a draft tree among all candidates (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.base.types import DraftTree


def best_nodes(confidence_BC: Tensor, budget: int) -> Tensor:
    """Returns pool indices of the root (0) and the `budget` most confident candidates, in pool order. A child
    is never more confident than its parent, so a chosen node's parent is chosen."""
    best_BN = confidence_BC.topk(min(budget, confidence_BC.shape[1]), dim=-1).indices
    chosen_BN = best_BN.sort(dim=-1).values + 1
    return torch.cat([torch.zeros_like(chosen_BN[:, :1]), chosen_BN], dim=1)


def select(tokens_BP: Tensor, parents_BP: Tensor, chosen_BN: Tensor) -> DraftTree:
    new_index_BP = torch.full_like(tokens_BP, -1)
    columns_N = torch.arange(chosen_BN.shape[1], device=tokens_BP.device)
    new_index_BP.scatter_(1, chosen_BN, columns_N.expand_as(chosen_BN))
    parents_BN = parents_BP.gather(1, chosen_BN)
    parents_BN[:, 1:] = new_index_BP.gather(1, parents_BN[:, 1:])
    return DraftTree(tokens_BP.gather(1, chosen_BN), parents_BN)
