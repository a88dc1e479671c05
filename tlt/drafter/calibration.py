"""Learning from verdicts how far to trust a drafter's confidence, and how sharply to rank its candidates.

Both are estimates of speed. Whatever they say, the tokens stay the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tlt.types import DraftTree, Verdict

DEFAULT_CONFIDENCE_THRESHOLD = 0.4
"""A drafted chain stops where the chance that all of it is accepted falls below this (docs/log.md)."""

_EDGES = (-6.0, -4.0, -3.0, -2.3, -1.6, -1.2, -0.9, -0.65, -0.45, -0.3, -0.18, -0.1, -0.05, -0.02)
"""Borders of the bins of raw log-confidence; finer where candidates are likely."""

_DEPTH_GROUPS = (0, 1, 2, 2, 3, 3, 3, 3)
"""Depths 0, 1, 2-3, 4-7 and from 8 on share their counts."""
_NUM_DEPTH_GROUPS = 5
_NUM_RANKS = 8
_PRIOR_COUNT = 8.0
_REFRESH_EVERY = 256
"""Candidates seen between two refreshes of the table on the device."""
_OBSERVED_ROWS = 8
"""Sequences of a batch that are counted: bounds the work on the host."""


class Calibration:
    """P(accepted | parent accepted) of a candidate by depth, rank among its siblings and raw confidence.

    Beta posterior means; the prior of a cell is the confidence itself, worth `_PRIOR_COUNT` observations. Only nodes whose
    parent lay on the accepted path count: of the others nobody knows what the target would have said.
    """

    UNUSED = -1
    """Cell of a node that is not to be counted."""

    def __init__(self, device: torch.device) -> None:
        num_bins = len(_EDGES) + 1
        centers = [_EDGES[0] - 1.0, *((a + b) / 2 for a, b in pairwise(_EDGES)), _EDGES[-1] / 2]
        prior = torch.tensor(centers).exp().expand(_NUM_DEPTH_GROUPS, _NUM_RANKS, num_bins)
        self.accepted = (prior * _PRIOR_COUNT).flatten().tolist()
        self.seen = [_PRIOR_COUNT] * len(self.accepted)
        self.prior = prior.flatten().tolist()
        self.device = device
        self.edges = torch.tensor(_EDGES, device=device)
        self._num_new = 0
        self._refresh()

    def __call__(self, depth: int, raw_BFW: Tensor) -> tuple[Tensor, Tensor]:
        """(cells, calibrated log-confidences) of candidates sorted by rank along the last axis; `depth` counts from 0."""
        group = _DEPTH_GROUPS[depth] if depth < len(_DEPTH_GROUPS) else _NUM_DEPTH_GROUPS - 1
        num_bins = len(_EDGES) + 1
        ranks_W = torch.arange(raw_BFW.shape[-1], device=raw_BFW.device).clamp_max_(_NUM_RANKS - 1)
        cells_BFW = torch.bucketize(raw_BFW, self.edges) + (group * _NUM_RANKS + ranks_W) * num_bins
        return cells_BFW, self.table[cells_BFW]

    def observe(self, tree: DraftTree, cells_BN: Tensor, verdicts: Sequence[Verdict]) -> None:
        """`cells_BN` holds the cells of the tree's nodes, the root left out. The tree may reach further than what was verified:
        every node counts whose rival, what the target said, is known."""
        rows = slice(0, _OBSERVED_ROWS)
        columns = zip(tree.tokens_BN[rows].tolist(), tree.parents_BN[rows].tolist(), cells_BN[rows].tolist(), strict=True)
        for (tokens, parents, cells), verdict in zip(columns, verdicts, strict=False):
            path = [0]
            for node, cell in enumerate(cells, start=1):
                depth = path.index(parents[node]) if parents[node] in path else len(verdict.tokens)
                if depth == len(verdict.tokens):
                    continue
                is_accepted = tokens[node] == verdict.tokens[depth]
                if is_accepted:
                    path.append(node)
                if cell != self.UNUSED:
                    self.seen[cell] += 1.0
                    self.accepted[cell] += float(is_accepted)
                    self._num_new += 1
        if self._num_new >= _REFRESH_EVERY:
            self._refresh()

    def age(self, keep: float = 0.5) -> None:
        """The drafter or the target has changed: what was observed keeps this share of its weight."""
        for cell, prior in enumerate(self.prior):
            self.seen[cell] = _PRIOR_COUNT + keep * (self.seen[cell] - _PRIOR_COUNT)
            self.accepted[cell] = prior * _PRIOR_COUNT + keep * (self.accepted[cell] - prior * _PRIOR_COUNT)
        self._refresh()

    def _refresh(self) -> None:
        accepted, seen = torch.tensor(self.accepted), torch.tensor(self.seen)
        self.table = (accepted / seen).clamp_(1e-6, 1.0).log_().to(self.device)
        self._num_new = 0


class TauSearch:
    """The coupling temperature with the most hits. No exploration is needed: at the root every tau can be judged by the same
    target token, so all of them learn from each verification looked at.

    tau: fixed when given.
    """

    CANDIDATES = (0.3, 0.45, 0.6, 0.7, 0.85, 1.0, 1.3)
    START = 0.7
    EVERY = 8  # proposals
    MEMORY = 2000.0  # verdicts

    def __init__(self, tau: float | None = None) -> None:
        self.is_fixed = tau is not None
        self.tau = self.START if tau is None else tau
        self.hits = [0.0] * len(self.CANDIDATES)
        self.num_seen = 0.0
        self._count = 0

    def guess(self, logits_BV: Tensor, noise_BV: Tensor, token_ids_V: Tensor | None = None) -> Tensor | None:
        """Returns the token that each tau would put first, [K, B], every now and then; else None. `token_ids_V` names a reduced
        vocabulary's tokens."""
        self._count += 1
        if self.is_fixed or self._count % self.EVERY:
            return None
        first_KB = torch.stack([(logits_BV / tau + noise_BV).argmax(-1) for tau in self.CANDIDATES])
        return first_KB if token_ids_V is None else token_ids_V[first_KB]

    def observe(self, guesses_KB: Tensor, tokens: Sequence[int]) -> None:
        """Counts the guesses that the target said: `tokens[b]` at the root of row b. A rival takes over when its lead in hits
        exceeds a standard error of the difference (at most the root of the misses of both)."""
        guesses = guesses_KB.tolist()
        fade = math.exp(-len(tokens) / self.MEMORY)
        self.num_seen = self.num_seen * fade + len(tokens)
        for k, row in enumerate(guesses):
            self.hits[k] = self.hits[k] * fade + sum(g == t for g, t in zip(row, tokens, strict=True))
        best, current = max(self.hits), self.hits[self.CANDIDATES.index(self.tau)]
        if best - current > math.sqrt(2 * self.num_seen - best - current):
            self.tau = self.CANDIDATES[self.hits.index(best)]
