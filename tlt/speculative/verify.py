"""Verification: the target draws its own token at every node, and the walk follows the drafts that agree.

Nothing of the drafter's enters but the tokens it proposed, so each committed token is the target's own sample of the
law (sampling.py): lossless for any drafter and any tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.speculative.rows import draw
from tlt.speculative.sampling import BatchParams, sample
from tlt.types import DraftTree, Verdict


@dataclass(frozen=True)
class NoiseAt:
    """Says which noise it is, for whoever draws to make: that of keys_B4[b] at positions_BN[b, n]."""

    keys_B4: Tensor
    positions_BN: Tensor


Noise = Tensor | NoiseAt
"""The noise of the position that follows each node: [B, N, V], or not made."""

Verify = Callable[[DraftTree, Tensor, Noise, BatchParams], list[Verdict]]
"""The type of `verify`; an audit puts a faulty one in its place."""


def verify(tree: DraftTree, logits_BNV: Tensor, noise_BNV: Noise, params: BatchParams) -> list[Verdict]:
    """One verdict per sequence. `logits_BNV` are the target's at every node, `noise_BNV` the noise of the position
    that *follows* each node. Synchronizes to hand them to the host: tokens and log-probabilities, of a draft the tree, too."""
    drawn = _draw(logits_BNV, noise_BNV, params) if isinstance(noise_BNV, NoiseAt) else sample(logits_BNV, noise_BNV, params)
    chosen, logprobs = (drawn_BN.tolist() for drawn_BN in drawn)
    if tree.num_nodes == 1:
        return [Verdict((c[0],), 0, (0,), (p[0],)) for c, p in zip(chosen, logprobs, strict=True)]
    tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
    return [_walk(*row) for row in zip(tokens, parents, chosen, logprobs, strict=True)]


def _draw(logits_BNV: Tensor, noise: NoiseAt, params: BatchParams) -> tuple[Tensor, Tensor]:
    """The law at every node, with noise that is nowhere in memory."""
    B, N, _ = logits_BNV.shape
    if N == 1:
        tokens_B, logprobs_B = draw(logits_BNV[:, 0], noise.keys_B4, noise.positions_BN[:, 0], params)
        return tokens_B[:, None], logprobs_B[:, None]
    rows_R = torch.arange(B, device=logits_BNV.device).repeat_interleave(N)
    tokens_R, logprobs_R = draw(
        logits_BNV.flatten(0, 1), noise.keys_B4[rows_R], noise.positions_BN.flatten(), params.take(rows_R)
    )
    return tokens_R.view(B, N), logprobs_R.view(B, N)


def _walk(tokens: list[int], parents: list[int], chosen: list[int], logprobs: list[float]) -> Verdict:
    node, path = 0, [0]
    for child in range(1, len(tokens)):  # parents come before children, so one pass finds the whole path
        if parents[child] == node and tokens[child] == chosen[node]:
            node = child
            path.append(child)
    return Verdict(tuple(chosen[i] for i in path), len(path) - 1, tuple(path), tuple(logprobs[i] for i in path))
