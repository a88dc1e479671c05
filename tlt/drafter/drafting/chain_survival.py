"""The chance that a drafted chain is accepted up to each of its tokens, by the scores that ranked them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.drafter.drafting.calibration import Calibration
from tlt.uploads import upload

_MOST_KEPT = 1 << 16
"""Scores of a level that are kept until an estimate is asked for: small operations cost by their number."""


class ChainSurvival:
    """Estimates the chances of one proposal's chains, level by level.

    calibration: corrects the raw confidences, the log-softmax of the scores; None: they are taken as is.
    unwanted: rows whose chains are discarded: their chance is 0.
    """

    def __init__(self, calibration: Calibration | None, unwanted: Sequence[int]) -> None:
        self.calibration, self.unwanted = calibration, unwanted
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._raw: list[Tensor] = []

    def add(self, scores_B1V: Tensor, best_B1: Tensor) -> None:
        """Adds the next level. best_B1: the score of its token."""
        if scores_B1V.numel() <= _MOST_KEPT:
            self._kept.append((scores_B1V, best_B1))
        else:
            self._raw.append(best_B1 - scores_B1V.logsumexp(dim=-1))

    def estimate(self) -> tuple[Tensor | None, Tensor]:
        """Returns the tokens' cells (`Calibration.note`), and the logarithm of the chance that each and all
        before it are accepted, both [B, D]."""
        if self._kept:
            scores, best = zip(*self._kept, strict=True)
            self._raw.append(torch.cat(best, dim=1) - torch.cat(scores, dim=1).logsumexp(dim=-1))
            self._kept.clear()
        log_chance_BD, cells_BD = torch.cat(self._raw, dim=1).float(), None
        if self.calibration is not None:
            cells_BD, log_chance_BD = self.calibration.estimate_chain(log_chance_BD)
        survival_BD = log_chance_BD.cumsum(1)
        if self.unwanted:
            survival_BD[upload(self.unwanted, survival_BD.device)] = -torch.inf
        return cells_BD, survival_BD
