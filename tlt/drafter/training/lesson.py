"""What a loss reads of a batch, and the base of presets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import Embed
from tlt.drafter.shape import DrafterShape, Method


@dataclass(frozen=True)
class Lesson:
    """A packed batch (`PackedBatch`) on the drafter's device and in its type, and what the target says of it.

    token_ids_N, captured_NF, lengths, weight_M: the batch; the weights are left on the CPU.
    embed: the target's embedding.
    head_VE: the rows that the drafter ranks with.
    target_VE: the same rows of the target's head.
    token_ids: the draft vocabulary; None: all tokens, or the drafter's own vocabulary.
    seed: of what the loss draws.
    """

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    weight_M: Tensor
    embed: Embed
    head_VE: Tensor
    target_VE: Tensor
    token_ids: Tensor | None
    seed: int

    @property
    def feature_NE(self) -> Tensor:
        """The target's features, the last of the captured columns."""
        return self.captured_NF[:, -self.target_VE.shape[1] :]

    @torch.no_grad()
    def target_probs(self, feature_ME: Tensor) -> Tensor:
        """Returns the target's distributions over the draft vocabulary, [M, V]."""
        return F.linear(feature_ME, self.target_VE).softmax(dim=-1)


@dataclass(frozen=True)
class Preset(ABC):
    """A way to train a drafter.

    name: as the configuration has it.
    method: the form of drafter that it trains.
    """

    name: str
    method: Method

    @abstractmethod
    def loss(self, model: Any, lesson: Lesson) -> Tensor:
        """Returns the loss of a drafter of this form."""

    @abstractmethod
    def rows_per_token(self, shape: DrafterShape) -> float:
        """Returns the rows that pass the drafter's layers for each token of a batch, at most."""
