"""Drafter training: one optimizer step on one packed batch. The target is packed, has no gradients, and is
only read."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import DraftModel, align, training_capture
from tlt.drafter.training.buffer import PackedBatch
from tlt.drafter.training.losses import Preset, draft_loss
from tlt.models.adam import adam_state, trained_tensors
from tlt.models.attention import Unrolled
from tlt.models.packed import PackedTransformer


class DrafterTrainer:
    """Trains the drafter's own parameters with AdamW.

    num_tokens: pairs of all batches so far.
    token_ids: the draft vocabulary over which the distributions are compared; None: the drafter's own,
        usually the whole vocabulary.
    """

    def __init__(
        self,
        model: DraftModel,
        target: PackedTransformer,
        preset: Preset,
        learning_rate: float = 1e-3,
        clip_grad_norm: float = 1.0,
    ) -> None:
        assert preset.method == model.config.method, "a preset trains its own form of drafter"
        self.model, self.target, self.preset = model, target, preset
        self.clip_grad_norm = clip_grad_norm
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.num_tokens = 0
        self.token_ids: Tensor | None = None

    @property
    def capture(self) -> tuple[int, ...]:
        """The target's layers to capture for a batch, in the order of its columns."""
        return training_capture(self.model.config, self.target.config.num_layers)

    def step(self, batch: PackedBatch) -> float:
        """Takes one optimizer step and returns the loss. FloatingPointError, before any weight changes, if
        it is not finite."""
        with torch.enable_grad():
            loss = self.loss(batch)
            loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"drafter training: the loss is {value} after {self.num_tokens} tokens; lower "
                "drafter.learning_rate"
            )
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_tokens += batch.num_tokens
        return value

    def loss(self, batch: PackedBatch) -> Tensor:
        """Returns the preset's loss, summed over its unrolled steps. In training as in drafting, every
        pair reads the true next tokens and, after the first step, its own hidden states. The batch may lie
        on another device."""
        model, preset, first = self.model, self.preset, self.parameters[0]
        dtype, device = first.dtype, first.device
        pairs = align(batch.lengths, device)
        token_ids_N, captured_NF = batch.token_ids_N.to(device), batch.captured_NF.to(device, dtype)
        feature_NE = captured_NF[:, -model.config.layer.hidden_size :]
        first_weight_M = batch.weight_M.to(device, dtype)
        head_VE = self.target.head_VE
        target_rows_VE = model.restrict(head_VE) if self.token_ids is None else head_VE[self.token_ids]
        target_rows_VE = target_rows_VE.to(dtype)
        rows_VE = model.lm_head.weight if model.config.owns_head else target_rows_VE
        with torch.no_grad():
            target_NV = F.linear(feature_NE, target_rows_VE).softmax(dim=-1)
        attend = Unrolled(model.config.layer, pairs.lengths)
        hidden_ME = model.fuse(captured_NF[pairs.feature_index_M])
        total = torch.zeros((), dtype=dtype, device=device)
        for step in range(preset.unrolled_steps):
            index_M, exists_M = pairs.ahead(step)
            # pair t predicts what pair t + step did at first
            weight_M = first_weight_M.roll(-step) * exists_M
            if not weight_M.any():
                break
            embeddings_ME = self.target.embed(token_ids_N[index_M]).to(dtype)
            hidden_ME = model(embeddings_ME, hidden_ME, pairs.positions_M + step * exists_M, attend)
            logits_MV = model.logits(hidden_ME, rows_VE)
            step_loss = draft_loss(
                hidden_ME, feature_NE[index_M], logits_MV, target_NV[index_M], weight_M, preset
            )
            total = total + preset.step_decay**step * step_loss
        return total

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that training changes, by name: weights and Adam's moments, not copies."""
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        return trained_tensors("drafter", self.optimizer, trained)

    def shared_tensors(self) -> list[Tensor]:
        """Returns the tensors that replicas average, in a fixed order: weights, Adam moments and step
        counts (on the CPU). Creates moments of zeros where there are none yet."""
        tensors: list[Tensor] = []
        for parameter in self.parameters:
            state = adam_state(self.optimizer, parameter)
            tensors += [parameter.data, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        return tensors
