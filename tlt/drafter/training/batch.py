"""The input of drafter losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import Embed
from tlt.drafter.shape import DrafterShape, Method
from tlt.models.decoder import ModelConfig


@dataclass(frozen=True)
class DrafterBatch:
    """A packed batch on the drafter's device, in its dtype.

    weight_M: on the CPU.
    head_VE, target_VE: the draft vocabulary's rows of the drafter's head and of the target's.
    target: its logits are those of target_VE, finished.
    token_ids: the draft vocabulary; None: all tokens, or the drafter's own.
    """

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    weight_M: Tensor
    embed: Embed
    head_VE: Tensor
    target_VE: Tensor
    target: ModelConfig
    token_ids: Tensor | None
    seed: int

    @property
    def feature_NE(self) -> Tensor:
        return self.captured_NF[:, -self.target_VE.shape[1] :]

    @torch.no_grad()
    def target_probs(self, feature_ME: Tensor) -> Tensor:
        """[M, draft vocabulary]"""
        return self.target.finish_logits(F.linear(feature_ME, self.target_VE)).softmax(dim=-1)


@dataclass(frozen=True)
class Preset(ABC):
    """A recipe for drafters of form `method`."""

    name: str
    method: Method

    @abstractmethod
    def loss(self, model: Any, batch: DrafterBatch) -> Tensor:
        """A scalar."""

    @abstractmethod
    def rows_per_token(self, shape: DrafterShape) -> float:
        """Most rows through the drafter's layers, per token of a batch."""
