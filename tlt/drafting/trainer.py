"""Training the drafter: one optimizer step on one packed batch. The target comes in packed and read-only; nothing here can
write to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt.drafting.buffer import PackedBatch
from tlt.drafting.losses import LossWeights, eagle_loss
from tlt.models.attention import PackedCausal
from tlt.models.drafter import DraftModel, align
from tlt.models.transformer import PackedTransformer


class DrafterTrainer:
    """AdamW on the drafter's own parameters. `num_tokens` counts all it was ever trained on."""

    def __init__(
        self,
        model: DraftModel,
        target: PackedTransformer,
        learning_rate: float = 1e-3,
        clip_grad_norm: float = 1.0,
        weights: LossWeights | None = None,
        own_feature_share: float = 0.5,
    ) -> None:
        self.model, self.target = model, target
        self.clip_grad_norm = clip_grad_norm
        self.weights = weights or LossWeights()
        self.own_feature_share = own_feature_share
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(0)
        self.num_tokens = 0

    def step(self, batch: PackedBatch) -> float:
        """One optimizer step; the loss. A loss that is not finite raises: a broken drafter must not go unnoticed."""
        pairs = align(batch.lengths)
        dtype = next(self.model.parameters()).dtype
        features_NE = batch.features_NE.to(dtype)
        inputs_ME = features_NE[pairs.feature_index_M]
        targets_ME = features_NE[pairs.target_index_M]
        embeddings_ME = self.target.embed(batch.token_ids_N[pairs.token_index_M]).to(dtype)
        attend = PackedCausal(self.model.config, pairs.lengths)
        inputs_ME = self._mix_in_own_features(embeddings_ME, inputs_ME, pairs.positions_M, attend)
        with torch.enable_grad():
            predicted_ME = self.model(embeddings_ME, inputs_ME, pairs.positions_M, attend)
            loss = eagle_loss(predicted_ME, targets_ME, self.target.head_VE.to(dtype), batch.weight_M.to(dtype), self.weights)
            loss.backward()
        value = loss.item()
        if value != value or value in (float("inf"), float("-inf")):
            raise FloatingPointError(
                f"drafter training: the loss is {value} after {self.num_tokens} tokens; lower drafter.learning_rate"
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_tokens += batch.num_tokens
        return value

    @torch.no_grad()
    def _mix_in_own_features(
        self, embeddings_ME: Tensor, features_ME: Tensor, positions_M: Tensor, attend: PackedCausal
    ) -> Tensor:
        """While drafting, all but the first pair read the drafter's own predictions. A share of the training inputs is
        therefore replaced by them (scheduled sampling, arXiv 1506.03099): pair t then reads what pair t - 1 predicted."""
        if self.own_feature_share == 0:
            return features_ME
        predicted_ME = self.model(embeddings_ME, features_ME, positions_M, attend)
        own_ME = torch.roll(predicted_ME, 1, dims=0)
        is_own_M = torch.rand(len(positions_M), generator=self.generator) < self.own_feature_share
        is_own_M &= positions_M > 0  # the first pair of a sequence has no predecessor
        return torch.where(is_own_M[:, None], own_ME, features_ME)

    def state_dict(self) -> dict[str, Any]:
        generator = self.generator.get_state()
        return {"optimizer": self.optimizer.state_dict(), "num_tokens": self.num_tokens, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_tokens = state["num_tokens"]
        self.generator.set_state(state["generator"].cpu())

    def shared_tensors(self) -> list[Tensor]:
        """Weights and Adam moments, in a fixed order: what replicas average. Moments exist from here on, if only as zeros."""
        tensors: list[Tensor] = []
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors += [parameter.data, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        return tensors
