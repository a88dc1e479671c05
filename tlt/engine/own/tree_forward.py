"""One target forward over draft trees, and their verification.

    trees behind their sequences ─▶ forward ─┬▶ captured, for the drafter
                                             └▶ features ─▶ logits of a piece ─▶ verdicts ─▶ next piece, where
                                                                                             all was accepted
    features: outputs of the final norm. captured: inputs of the layers that the drafter names.

Long chains go piece by piece: at a vocabulary of 152k, logits of 256 nodes take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Verdict
from tlt.base.uploads import upload
from tlt.engine.own.noise import BatchLaw
from tlt.models.attention import Cached, cached_trees, pad
from tlt.models.graphs import MOST_TOKENS, Graphs, padded_length
from tlt.models.kv_cache import Cache
from tlt.models.target import Target
from tlt.speculation.law.tree import TreeLayout, chain
from tlt.speculation.law.verify import verify

PIECE = Strategy.MAX_DEPTH + 1
"""Nodes of a chain verified at a time, the root included."""


@dataclass(frozen=True)
class TreeForward:
    """A forward over trees before its logits are computed.

    features_NE: at the real nodes, without padding.
    real_N: their indices; None: all are real.
    """

    target: Target
    tree: DraftTree
    nodes: TreeLayout
    features_NE: Tensor
    real_N: Tensor | None

    def verdicts(self, law: BatchLaw) -> list[Verdict]:
        B, N = self.tree.tokens_BN.shape
        rows = list(range(B))
        if N <= PIECE or not self.tree.is_chain:
            return verify(self.tree, self.logits(), law.of_nodes(self.nodes, rows, 0, N))
        features_BNE = pad(self.features_NE, self.real_N, B * N).view(B, N, -1)
        tokens = self.tree.tokens_BN.tolist()
        found: list[list[Verdict]] = [[] for _ in rows]
        for first in range(0, N, PIECE):
            counts = [min(self.tree.row_lengths[row] - first, PIECE) for row in rows]
            end = first + max(counts)
            piece = chain(self.tree.tokens_BN[rows, first:end], counts)
            logits_bnV = self._logits_of_piece(features_BNE[rows, first:end], counts)
            verdicts = verify(piece, logits_bnV, law.of_nodes(self.nodes, rows, first, end))
            goes_on = []
            for row, count, verdict in zip(rows, counts, verdicts, strict=True):
                found[row].append(verdict)
                is_kept = verdict.num_accepted == count - 1 and self.tree.row_lengths[row] > first + PIECE
                if is_kept and verdict.tokens[-1] == tokens[row][first + PIECE]:
                    goes_on.append(row)
            rows = goes_on
            if not rows:
                break
        lengths = self.tree.row_lengths
        return [_join(pieces, tokens[row][: lengths[row]]) for row, pieces in enumerate(found)]

    def logits(self) -> Tensor:
        """[B, N, V]; zeros at padding."""
        B, N = self.tree.tokens_BN.shape
        return pad(self.target.logits(self.features_NE), self.real_N, B * N).view(B, N, -1)

    def _logits_of_piece(self, features_bnE: Tensor, counts: Sequence[int]) -> Tensor:
        """[b, n, V]; zeros at padding."""
        b, n, _ = features_bnE.shape
        device = features_bnE.device
        is_real_bn = torch.arange(n, device=device) < upload(counts, device)[:, None]
        real_N = is_real_bn.flatten().nonzero()[:, 0]
        return pad(self.target.logits(features_bnE.flatten(0, 1)[real_N]), real_N, b * n).view(b, n, -1)


def recorded_length(graphs: Graphs, target: Target, cache: Cache, tree: DraftTree, length: int) -> int | None:
    """Columns that a recorded forward reads; None: it runs eagerly."""
    if graphs.is_on and target.is_recordable and tree.tokens_BN.numel() <= MOST_TOKENS:
        return min(padded_length(length), cache.capacity)
    return None


def forward_trees(
    target: Target,
    cache: Cache,
    tree: DraftTree,
    nodes: TreeLayout,
    capture: Sequence[int],
    graphs: Graphs | None,
) -> tuple[Tensor, TreeForward]:
    """Returns the captured features, [B, N, F], and the forward to verify.

    graphs: to record the forward with, padding included (`nodes` has a `recorded_length`); None: eagerly.
    """
    B, N = tree.tokens_BN.shape
    if N > 1 and (unsound_V := target.unsound_V) is not None:  # any other draft token is as valid
        roots_B1 = tree.tokens_BN[:, :1]
        tree = replace(tree, tokens_BN=torch.where(unsound_V[tree.tokens_BN], roots_B1, tree.tokens_BN))
    config, layers = target.config, cache.layers
    if graphs is not None:
        return _replay(target, cache, tree, nodes, capture, graphs)
    attend = cached_trees(config, layers, nodes)
    real_N = attend.real_N
    tokens_N, positions_N = tree.tokens_BN.flatten(), nodes.positions_BN.flatten()
    if real_N is not None:
        tokens_N, positions_N = tokens_N[real_N], positions_N[real_N]
    if nodes.length > config.max_positions:  # drafts beyond the window are never kept
        positions_N = positions_N.clamp_max(config.max_positions - 1)
    features_NE, captured_NF = target.forward_capturing(tokens_N, positions_N, attend, capture)
    forward = TreeForward(target, tree, nodes, features_NE, real_N)
    return pad(captured_NF, real_N, B * N).view(B, N, -1), forward


def _replay(
    target: Target, cache: Cache, tree: DraftTree, nodes: TreeLayout, capture: Sequence[int], graphs: Graphs
) -> tuple[Tensor, TreeForward]:
    config, layers, length = target.config, cache.layers, nodes.length
    assert nodes.mask_BNL is not None, "added rows and columns are masked"
    is_tree = nodes.parents_BN is not None

    def forward(
        tokens_BN: Tensor, positions_BN: Tensor, columns_BN: Tensor, mask_BNL: Tensor
    ) -> tuple[Tensor, ...]:
        attend = Cached(
            config, layers, columns_BN, length, mask_BNL, positions_BT=positions_BN if is_tree else None
        )
        tokens_N, positions_N = tokens_BN.flatten(), positions_BN.flatten()
        found = target.forward_capturing(tokens_N, positions_N, attend, capture)
        return tuple(x_NE.view(*tokens_BN.shape, -1) for x_NE in found)

    inputs = {
        "tokens_BN": tree.tokens_BN,
        "positions_BN": nodes.positions_BN.clamp_max(config.max_positions - 1),
        "columns_BN": nodes.columns_BN,
        "mask_BNL": nodes.mask_BNL,
    }
    graphs.keep_to(cache.num_resizes)
    features_BNE, captured_BNF = graphs.run(
        (tuple(capture), length, is_tree), forward, inputs, cache.num_slots
    )
    return captured_BNF, TreeForward(target, tree, nodes, features_BNE.flatten(0, 1), None)


def along_paths(captured_BNF: Tensor, verdicts: Sequence[Verdict]) -> Tensor:
    """A path shorter than others repeats its last node."""
    longest = max(len(verdict.path) for verdict in verdicts)
    nodes = [[*v.path, *[v.path[-1]] * (longest - len(v.path))] for v in verdicts]
    rows_B1 = torch.arange(len(nodes), device=captured_BNF.device)[:, None]
    return captured_BNF[rows_B1, upload(nodes, captured_BNF.device)]


def _join(pieces: Sequence[Verdict], chain_tokens: Sequence[int]) -> Verdict:
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
    num, num_nodes = len(tokens), len(chain_tokens)
    rejected = chain_tokens[num] if num < num_nodes else None
    return Verdict(tokens, num - 1, tuple(range(num)), logprobs, num_nodes - 1, rejected, num_nodes - 1)
