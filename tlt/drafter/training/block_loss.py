"""The loss of block drafters, at sampled anchors.

window    t0 t1 t2 t3 t4 t5 t6        an anchor at t3: its block sees t0 t1 t2 and itself, and learns
block              t3  m  m  m        the target's distributions behind t3, t4, t5, …

slot loss  = CE · cross-entropy(p, q) + L1 · sum_v |p(v) - q(v)|        p: the target's, q: the drafter's
weight     = e^(-d / decay), or D-PACE's, of the d-th drafted token
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tlt.base.uploads import upload
from tlt.drafter.block import BlockModel, run_blocks
from tlt.drafter.model import Anchors
from tlt.drafter.pairs import TOKEN_AHEAD
from tlt.drafter.shape import BlockShape, DrafterShape
from tlt.drafter.training.batch import DrafterBatch, Preset

_PACE = 0.5
"""D-PACE's α: least chance of a slot (arXiv 2605.18810)."""


@dataclass(frozen=True)
class BlockPreset(Preset):
    """distribution_weight: of the cross-entropy.
    variation_weight: of the L1 distance, twice the total variation.
    slots: slot weights: exponential decay, or the chance that a draft gets there.
    decay: slots after which the weight has fallen to 1 / e.
    anchor_share: blocks per loss position; at least one block.
    """

    distribution_weight: float
    variation_weight: float = 0.0
    slots: Literal["decay", "d-pace"] = "decay"
    decay: float = 4.0
    max_anchors: int = 512
    anchor_share: float = 0.25

    def rows_per_token(self, shape: DrafterShape) -> float:
        assert isinstance(shape, BlockShape), shape
        return self.anchor_share * shape.block_size

    def loss(self, model: BlockModel, batch: DrafterBatch) -> Tensor:
        shape, device = model.config, batch.token_ids_N.device
        anchors = self.sample_anchors(batch)
        slots = find_slots(batch.lengths, anchors, shape.max_depth, device)
        hidden_ADE = run_blocks(model, batch, anchors, batch.embed)[:, shape.first_slot :]
        hidden_ME, tokens_M = hidden_ADE[slots.block_M, slots.depth_M], batch.token_ids_N[slots.index_M]
        logits_MV, bias_MV = model.logits(hidden_ME, batch.head_VE), model.bias(tokens_M, batch.token_ids)
        logits_MV = logits_MV if bias_MV is None else logits_MV + bias_MV
        target_MV = batch.target_probs(batch.feature_NE[slots.index_M])
        entropy_M = -(target_MV * logits_MV.log_softmax(dim=-1)).sum(dim=-1)
        distance_M = (target_MV - logits_MV.softmax(dim=-1)).abs().sum(dim=-1)
        loss_M = self.distribution_weight * entropy_M + self.variation_weight * distance_M
        weight_M = self.slot_weights(entropy_M.detach(), slots, hidden_ADE.shape[1])
        return (loss_M * weight_M).sum() / weight_M.sum()

    def sample_anchors(self, batch: DrafterBatch) -> list[list[int]]:
        """An anchor is followed by a response token."""
        rows = batch.weight_M.split([length - TOKEN_AHEAD for length in batch.lengths])
        predicting = [row.nonzero()[:, 0].tolist() for row in rows]
        found = [(window, t + TOKEN_AHEAD) for window, row in enumerate(predicting) for t in row]
        wanted = min(max(round(self.anchor_share * len(found)), 1), self.max_anchors, len(found))
        chosen = sorted(random.Random(batch.seed).sample(found, wanted))
        return [[place for w, place in chosen if w == window] for window in range(len(batch.lengths))]

    def slot_weights(self, entropy_M: Tensor, slots: Slots, max_depth: int) -> Tensor:
        """D-PACE: the sum, from a slot on, of the chances that a draft reaches each slot."""
        if self.slots == "decay":
            return torch.exp(-slots.depth_M.to(entropy_M.dtype) / self.decay)
        chance_AD = entropy_M.new_zeros(slots.num_blocks, max_depth)
        chance_AD[slots.block_M, slots.depth_M] = (1 - _PACE) * torch.exp(-entropy_M) + _PACE
        survival_AD = chance_AD.cumprod(dim=1)
        return survival_AD.flip(1).cumsum(dim=1).flip(1)[slots.block_M, slots.depth_M]


@dataclass(frozen=True)
class Slots:
    """The M slots with a distribution to match.

    block_M: the block of each.
    depth_M: tokens drafted before it.
    index_M: packed index of the token before the proposed one, whose feature gives the distribution.
    """

    num_blocks: int
    block_M: Tensor
    depth_M: Tensor
    index_M: Tensor


def find_slots(lengths: Sequence[int], anchors: Anchors, max_depth: int, device: torch.device) -> Slots:
    """Slots without a feature in their anchor's sequence are left out."""
    found: list[tuple[int, int, int]] = []
    start = block = 0
    for length, places in zip(lengths, anchors, strict=True):
        for place in places:
            found += [(block, d, start + place + d) for d in range(min(max_depth, length - place))]
            block += 1
        start += length
    return Slots(block, *upload(found, device).unbind(1))
