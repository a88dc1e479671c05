"""Estimated acceptance (Calibration) and coupling temperature (TauSearch), which affect speed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tlt.base.types import DraftTree, Verdict
from tlt.base.uploads import upload

_EDGES = (-6.0, -4.0, -3.0, -2.3, -1.6, -1.2, -0.9, -0.65, -0.45, -0.3, -0.18, -0.1, -0.05, -0.02)
"""Bins of raw confidence, the log-softmax of a candidate's score."""

_LEVEL_GROUPS = (0, 1, 2, 2, 3, 3, 3, 3)
"""Levels 0, 1, 2-3, 4-7 and from 8 on count together."""
_NUM_LEVEL_GROUPS = 5
_NUM_RANKS = 8
"""Among siblings; later ones count as the last."""
_PRIOR_COUNT = 8.0
"""Weight of a cell's prior in observations."""
_REFRESH_EVERY = 256
"""Counted candidates between refreshes of the table on the device."""
_OBSERVED_ROWS = 8
"""Most sequences whose verdicts are counted; bounds the work on the host."""


def _group_of(level: int) -> int:
    return _LEVEL_GROUPS[level] if level < len(_LEVEL_GROUPS) else _NUM_LEVEL_GROUPS - 1


def sent_to_host(values: Tensor) -> Tensor:
    """Copies without waiting: the copy is complete once the host has waited for later work of the device."""
    return values.to("cpu", non_blocking=True)


class Calibration:
    """Estimates P(accepted | parent accepted) by level, rank among siblings and raw confidence.

    Each combination is a cell with a Beta posterior, whose prior trusts the raw confidence. Only children of
    accepted nodes count: behind others the target's token is unknown.
    """

    UNUSED = -1
    """The cell of a node that does not count."""

    def __init__(self, device: torch.device) -> None:
        num_bins = len(_EDGES) + 1
        centers = [_EDGES[0] - 1.0, *((a + b) / 2 for a, b in pairwise(_EDGES)), _EDGES[-1] / 2]
        prior = torch.tensor(centers).exp().expand(_NUM_LEVEL_GROUPS, _NUM_RANKS, num_bins)
        self.accepted = (prior * _PRIOR_COUNT).flatten().tolist()
        self.seen = [_PRIOR_COUNT] * len(self.accepted)
        self.prior = prior.flatten().tolist()
        self.device = device
        self.edges = torch.tensor(_EDGES, device=device)
        self._num_new = 0
        self._refresh()

    def estimate(self, level: int, raw_confidence_BFW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (cells, log P(accepted | parent accepted)), both [B, F, W]: F nodes, W candidates of each,
        best first."""
        num_bins, device = len(_EDGES) + 1, raw_confidence_BFW.device
        ranks_W = torch.arange(raw_confidence_BFW.shape[-1], device=device).clamp_max_(_NUM_RANKS - 1)
        cells_BFW = torch.bucketize(raw_confidence_BFW, self.edges)
        cells_BFW = cells_BFW + (_group_of(level) * _NUM_RANKS + ranks_W) * num_bins
        return cells_BFW, self.table[cells_BFW]

    def note(self, tree: DraftTree, cells_BN: Tensor) -> Tensor:
        """Returns the argument of `observe`, [3, rows, nodes], on its way to the host. cells_BN: without the
        root."""
        rows = slice(0, _OBSERVED_ROWS)
        noted = [tree.tokens_BN[rows, 1:], tree.parents_BN[rows, 1:], cells_BN[rows]]
        return sent_to_host(torch.stack(noted))

    def observe(self, noted_3BN: Tensor, verdicts: Sequence[Verdict]) -> None:
        for tokens, parents, cells, verdict in zip(*noted_3BN.tolist(), verdicts, strict=False):
            path = [0]
            for node, (token, parent, cell) in enumerate(zip(tokens, parents, cells, strict=True), start=1):
                # a node's level is its parent's depth, which is its parent's place in the accepted path
                level = path.index(parent) if parent in path else len(verdict.tokens)
                if level == len(verdict.tokens):
                    continue
                is_accepted = token == verdict.tokens[level]
                if is_accepted:
                    path.append(node)
                if cell != self.UNUSED:
                    self.seen[cell] += 1.0
                    self.accepted[cell] += float(is_accepted)
                    self._num_new += 1
        if self._num_new >= _REFRESH_EVERY:
            self._refresh()

    def age(self, keep: float = 0.5) -> None:
        for cell, prior in enumerate(self.prior):
            self.seen[cell] = _PRIOR_COUNT + keep * (self.seen[cell] - _PRIOR_COUNT)
            self.accepted[cell] = prior * _PRIOR_COUNT + keep * (self.accepted[cell] - prior * _PRIOR_COUNT)
        self._refresh()

    def counters(self) -> dict[str, Any]:
        return {"accepted": list(self.accepted), "seen": list(self.seen)}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.accepted, self.seen = list(counters["accepted"]), list(counters["seen"])
        self._refresh()

    def _refresh(self) -> None:
        accepted, seen = torch.tensor(self.accepted), torch.tensor(self.seen)
        self.table = upload((accepted / seen).clamp_(1e-6, 1.0).log_().tolist(), self.device)
        self._num_new = 0


class TauSearch:
    """Finds the coupling temperature whose first candidate is most often the target's token.

    At level 0 the target's token is always known, so one verification judges every tau. Why tau < 1:
    tlt/speculation/__init__.py.

    tau: fixed; None: search.
    """

    CANDIDATES = (0.3, 0.45, 0.6, 0.7, 0.85, 1.0, 1.3)
    START = 0.7
    EVERY = 8
    """One in this many proposals is judged."""
    MEMORY = 2000.0
    """Verdicts after which a hit has faded to 1 / e."""

    def __init__(self, tau: float | None = None) -> None:
        self.is_fixed = tau is not None
        self.tau = self.START if tau is None else tau
        self.hits = [0.0] * len(self.CANDIDATES)
        self.num_seen = 0.0
        self._count = 0

    def judges_next(self) -> bool:
        self._count += 1
        return not self.is_fixed and self._count % self.EVERY == 0

    def guess(self, logits_BV: Tensor, noise_BV: Tensor, token_ids_V: Tensor | None = None) -> Tensor:
        """Returns the first token of each of K taus, [B, K].

        token_ids_V: the target's ids of a reduced draft vocabulary.
        """
        first_BK = torch.stack([(logits_BV / tau + noise_BV).argmax(-1) for tau in self.CANDIDATES], dim=1)
        return first_BK if token_ids_V is None else token_ids_V[first_BK]

    def observe(self, guesses_BK: Tensor, tokens: Sequence[int]) -> None:
        """guesses_BK: on the host. tokens: the target's, at the roots.

        Another tau takes over when its lead exceeds a standard error of the difference, at most the square
        root of both's misses.
        """
        guesses = guesses_BK.T.tolist()
        fade = math.exp(-len(tokens) / self.MEMORY)
        self.num_seen = self.num_seen * fade + len(tokens)
        for k, row in enumerate(guesses):
            self.hits[k] = self.hits[k] * fade + sum(g == t for g, t in zip(row, tokens, strict=True))
        best, current = max(self.hits), self.hits[self.CANDIDATES.index(self.tau)]
        if best - current > math.sqrt(2 * self.num_seen - best - current):
            self.tau = self.CANDIDATES[self.hits.index(best)]

    def counters(self) -> dict[str, Any]:
        return {"tau": self.tau, "hits": list(self.hits), "num_seen": self.num_seen}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.tau, self.hits, self.num_seen = counters["tau"], list(counters["hits"]), counters["num_seen"]
