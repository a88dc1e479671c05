"""The alignment of tokens with the target's features.

pair t     (token t+1, feature t): EAGLE's drafter reads it, and predicts token t+2
anchor     token t+1 of a pair: a block begins with it, and predicts token t+2 and those behind it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOKEN_AHEAD = 1
"""Pair t joins feature t with token t + TOKEN_AHEAD."""

FIRST_PREDICTED = TOKEN_AHEAD + 1
"""Pair t predicts token t + FIRST_PREDICTED; no pair predicts a sequence's tokens before it."""


def predicts_response(num_prompt: int, start: int, num_tokens: int) -> Tensor:
    """Returns bool[num_tokens - 1]. start, num_prompt: where window and response begin in the sequence."""
    return torch.arange(num_tokens - TOKEN_AHEAD) + start + FIRST_PREDICTED >= num_prompt


@dataclass(frozen=True)
class Alignment:
    """M pairs, as indices of packed features and tokens. lengths: pairs of each sequence."""

    lengths: tuple[int, ...]
    feature_index_M: Tensor
    token_index_M: Tensor
    positions_M: Tensor

    def ahead(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Returns the index of the token that each pair reads after `num_steps` drafted tokens, clamped to
        its sequence's last, and whether that token exists."""
        lengths_S = torch.tensor(self.lengths, device=self.token_index_M.device)
        last_S = lengths_S.cumsum(0) + torch.arange(len(lengths_S), device=lengths_S.device)
        last_M = torch.repeat_interleave(last_S, lengths_S, output_size=len(self.token_index_M))
        index_M = self.token_index_M + num_steps
        return torch.minimum(index_M, last_M), index_M <= last_M


def align(lengths: Sequence[int], device: torch.device | str = "cpu") -> Alignment:
    """n tokens make n - 1 pairs."""
    num_pairs = tuple(length - TOKEN_AHEAD for length in lengths)
    positions = [torch.arange(num, device=device) for num in num_pairs]
    starts = itertools.accumulate(lengths, initial=0)
    feature_index_M = torch.cat([pairs + start for pairs, start in zip(positions, starts, strict=False)])
    return Alignment(num_pairs, feature_index_M, feature_index_M + TOKEN_AHEAD, torch.cat(positions))
