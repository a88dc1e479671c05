"""What a drafter is trained to match: the target's next feature, and the distribution the target's head makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossWeights:
    """EAGLE (arXiv 2401.15077, §4.2) adds Smooth L1 on features and 0.1 times the cross-entropy between the two
    distributions. Here both count alike, since the distribution is what acceptance depends on; the ratio has not been
    tuned."""

    feature: float = 1.0
    distribution: float = 1.0


def eagle_loss(predicted_ME: Tensor, target_ME: Tensor, head_VE: Tensor, weight_M: Tensor, weights: LossWeights) -> Tensor:
    """Mean over pairs of Smooth L1(predicted, target) + soft cross-entropy(head(target), head(predicted)).

    weight_M is 1 where the pair predicts a response token and 0 elsewhere; at least one must be 1.
    """
    feature_M = F.smooth_l1_loss(predicted_ME, target_ME, reduction="none").mean(dim=-1)
    target_MV = F.linear(target_ME, head_VE).softmax(dim=-1)
    distribution_M = -(target_MV * F.linear(predicted_ME, head_VE).log_softmax(dim=-1)).sum(dim=-1)
    loss_M = weights.feature * feature_M + weights.distribution * distribution_M
    return (loss_M * weight_M).sum() / weight_M.sum()
