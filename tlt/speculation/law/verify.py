"""Verification: the target draws its own token at every node, and the walk follows the drafts that agree.

    root ─┬─ a ─── c        the target draws a at the root, d at a: committed a d, accepted 1 (a)
          └─ b

Every committed token is the target's own sample, so speculation is lossless for any drafter and any tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.base.types import DraftTree, Verdict
from tlt.speculation.law.draw import draw
from tlt.speculation.law.params import Law


def verify(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
    """One verdict per sequence. Synchronizes once.

    law: of B · N rows, the nodes one sequence after the other, at the position that *follows* each node.
    """
    drawn = draw(logits_BNV.flatten(0, 1), law)
    chosen_BN, logprobs_BN = (drawn_R.view(logits_BNV.shape[:2]) for drawn_R in drawn)
    if tree.num_nodes == 1:
        (chosen,), logprobs = to_host([chosen_BN], logprobs_BN)
        return [Verdict((c[0],), 0, (0,), (p[0],)) for c, p in zip(chosen, logprobs, strict=True)]
    if tree.is_chain:
        (chosen, tokens), logprobs = to_host([chosen_BN, tree.tokens_BN], logprobs_BN)
        rows = zip(tokens, tree.row_lengths, chosen, logprobs, strict=True)
        return [_walk_chain(*row) for row in rows]
    (chosen, tokens, parents), logprobs = to_host([chosen_BN, tree.tokens_BN, tree.parents_BN], logprobs_BN)
    return [_walk_tree(*row) for row in zip(tokens, parents, chosen, logprobs, strict=True)]


def to_host(integers: Sequence[Tensor], reals: Tensor) -> tuple[list[list[list[int]]], list[list[float]]]:
    """Brings tensors of one shape to the host in one transfer: reals travel as the bits of their float64."""
    packed = torch.stack([*integers, reals.double().view(torch.int64)]).cpu()
    return packed[:-1].tolist(), packed[-1].view(torch.float64).tolist()


def _walk_chain(tokens: list[int], length: int, chosen: list[int], logprobs: list[float]) -> Verdict:
    end = 1
    while end < length and tokens[end] == chosen[end - 1]:
        end += 1
    return Verdict(
        tokens=tuple(chosen[:end]),
        num_accepted=end - 1,
        path=tuple(range(end)),
        logprobs=tuple(logprobs[:end]),
        num_drafted=length - 1,
        rejected=tokens[end] if end < length else None,
        num_levels=length - 1,
    )


def _walk_tree(tokens: list[int], parents: list[int], chosen: list[int], logprobs: list[float]) -> Verdict:
    node, path = 0, [0]
    depths = [0] * len(tokens)
    for child in range(1, len(tokens)):  # parents come before children, so one pass finds the whole path
        if parents[child] >= 0:
            depths[child] = depths[parents[child]] + 1
        if parents[child] == node and tokens[child] == chosen[node]:
            node = child
            path.append(child)
    return Verdict(
        tokens=tuple(chosen[i] for i in path),
        num_accepted=len(path) - 1,
        path=tuple(path),
        logprobs=tuple(logprobs[i] for i in path),
        num_drafted=len(tokens) - parents.count(-1),  # neither the root nor padding has a parent
        rejected=tokens[parents.index(node)] if node in parents else None,
        num_levels=max(depths),
    )
