"""The loss of drafter training, and its presets: three published ways to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import Method


@dataclass(frozen=True)
class Preset:
    """A way to train a drafter.

    name: as the configuration has it.
    method: the form of drafter that it trains.
    unrolled_steps: steps that every pair drafts in training; from the second on it reads its own hidden
        state.
    step_decay: weight of a step's loss relative to the step before.
    feature_weight: weight of Smooth L1 between the drafter's hidden state and the target's feature.
    distribution_weight: weight of the cross-entropy between the two distributions.
    """

    name: str
    method: Method
    unrolled_steps: int
    step_decay: float
    feature_weight: float
    distribution_weight: float


_PRESETS = (
    # EAGLE, arXiv 2401.15077, section 4.2: features, and 0.1 times the distribution.
    Preset("eagle", "eagle", 1, 1.0, 1.0, 0.1),
    # HASS, arXiv 2408.15766, section 3.2: EAGLE's losses over three steps aligned with drafting, without its
    # top-k loss. The distribution counts in full, because 0.1 was worse (benchmarks/log.md).
    Preset("hass", "eagle", 3, 1.0, 1.0, 1.0),
    # EAGLE-3, arXiv 2503.01840, section 3.2: the distribution alone, over seven steps. The decay is that of
    # its training code.
    Preset("eagle3", "eagle3", 7, 0.8, 0.0, 1.0),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}

DEFAULT_PRESET: Mapping[Method, str] = {"eagle": "hass", "eagle3": "eagle3"}
"""The preset of a drafter that does not say how it was trained."""


def draft_loss(
    hidden_ME: Tensor,
    feature_ME: Tensor,
    logits_MV: Tensor,
    target_MV: Tensor,
    weight_M: Tensor,
    preset: Preset,
) -> Tensor:
    """Returns the mean loss of one step over the pairs of weight 1.

    hidden_ME, logits_MV: the drafter's output.
    feature_ME, target_MV: the target's features and probabilities.
    weight_M: 1 where the pair predicts a response token, else 0; at least one must be 1.
    """
    loss_M = -preset.distribution_weight * (target_MV * logits_MV.log_softmax(dim=-1)).sum(dim=-1)
    if preset.feature_weight:
        feature_M = F.smooth_l1_loss(hidden_ME, feature_ME, reduction="none").mean(dim=-1)
        loss_M = loss_M + preset.feature_weight * feature_M
    return (loss_M * weight_M).sum() / weight_M.sum()
