"""The loss of EAGLE's family, summed over the drafter's own steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.eagle import EagleModel
from tlt.drafter.pairs import align
from tlt.drafter.shape import DrafterShape
from tlt.drafter.training.batch import DrafterBatch, Preset
from tlt.models.attention import Unrolled


@dataclass(frozen=True)
class EaglePreset(Preset):
    """unrolled_steps: tokens that every pair drafts.
    step_decay: weight of a step's loss relative to the step before.
    feature_weight: of Smooth L1 between hidden state and feature.
    distribution_weight: of the cross-entropy.
    """

    unrolled_steps: int
    step_decay: float
    feature_weight: float
    distribution_weight: float

    def rows_per_token(self, shape: DrafterShape) -> float:
        return self.unrolled_steps

    def loss(self, model: EagleModel, batch: DrafterBatch) -> Tensor:
        """Every pair reads the true next tokens and, after the first step, its own hidden states."""
        device, dtype = batch.token_ids_N.device, batch.captured_NF.dtype
        first_weight_M = batch.weight_M.to(device, dtype)
        pairs = align(batch.lengths, device)
        feature_NE = batch.feature_NE
        target_NV = batch.target_probs(feature_NE)
        attend = Unrolled(model.config.layer, pairs.lengths)
        hidden_ME = model.fuse(batch.captured_NF[pairs.feature_index_M])
        total = torch.zeros((), dtype=dtype, device=device)
        for step in range(self.unrolled_steps):
            index_M, exists_M = pairs.ahead(step)
            # after `step` drafted tokens, pair t predicts the token of pair t + step
            weight_M = first_weight_M.roll(-step) * exists_M
            if not weight_M.any():
                break
            embeddings_ME = batch.embed(batch.token_ids_N[index_M])
            hidden_ME = model(embeddings_ME, hidden_ME, pairs.positions_M + step * exists_M, attend)
            logits_MV = model.logits(hidden_ME, batch.head_VE)
            step_loss = self.step_loss(
                hidden_ME, feature_NE[index_M], logits_MV, target_NV[index_M], weight_M
            )
            total = total + self.step_decay**step * step_loss
        return total

    def step_loss(
        self, hidden_ME: Tensor, feature_ME: Tensor, logits_MV: Tensor, target_MV: Tensor, weight_M: Tensor
    ) -> Tensor:
        """Mean over the pairs of weight 1, at least one."""
        loss_M = -self.distribution_weight * (target_MV * logits_MV.log_softmax(dim=-1)).sum(dim=-1)
        if self.feature_weight:
            feature_M = F.smooth_l1_loss(hidden_ME, feature_ME, reduction="none").mean(dim=-1)
            loss_M = loss_M + self.feature_weight * feature_M
        return (loss_M * weight_M).sum() / weight_M.sum()
