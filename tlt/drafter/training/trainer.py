"""Drafter training: one optimizer step on one packed batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.model import DraftModel
from tlt.drafter.shape import training_capture
from tlt.drafter.training.batch import DrafterBatch, Preset
from tlt.drafter.training.buffer import PackedBatch
from tlt.models.adam import adam_state, trained_tensors
from tlt.models.target import Target


@dataclass(frozen=True)
class _Source:
    version: int
    head_VE: Tensor
    token_ids: Tensor | None

    def is_same(self, other: _Source) -> bool:
        same = self.head_VE is other.head_VE and self.token_ids is other.token_ids
        return same and self.version == other.version


class DrafterTrainer:
    """num_tokens: pairs of all batches so far.
    token_ids: the draft vocabulary of the loss; None: the drafter's own, usually all tokens.
    """

    def __init__(
        self,
        model: DraftModel,
        target: Target,
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
        self._head: tuple[_Source, Tensor] | None = None  # made for this policy and vocabulary

    @property
    def capture(self) -> tuple[int, ...]:
        return training_capture(self.model.config, self.target.config.num_layers)

    def step(self, batch: PackedBatch) -> float:
        """Returns the loss. Raises FloatingPointError, before any weight changes, if it is not finite."""
        with torch.enable_grad():
            loss = self.loss(batch)
            loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            what = f"the loss is {value} after {self.num_tokens} tokens; lower drafter.learning_rate"
            raise FloatingPointError(f"drafter training: {what}")
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_tokens += batch.num_tokens
        return value

    def loss(self, batch: PackedBatch) -> Tensor:
        """The batch may lie on another device. The seed is `num_tokens`, so that a resumed training draws the
        same."""
        model, target_VE = self.model, self._target_head()
        dtype, device = self.parameters[0].dtype, self.parameters[0].device
        drafter_batch = DrafterBatch(
            token_ids_N=batch.token_ids_N.to(device),
            captured_NF=batch.captured_NF.to(device, dtype),
            lengths=batch.lengths,
            weight_M=batch.weight_M,
            embed=lambda token_ids: self.target.embed(token_ids).to(dtype),
            head_VE=model.lm_head.weight if model.config.owns_head else target_VE,
            target_VE=target_VE,
            target=self.target.config,
            token_ids=self.token_ids,
            seed=self.num_tokens,
        )
        return self.preset.loss(model, drafter_batch)

    def _target_head(self) -> Tensor:
        source = _Source(self.target.version, self.target.head_VE, self.token_ids)
        if self._head is None or not source.is_same(self._head[0]):
            self._head = None  # not two copies at a time
            head_VE, token_ids = source.head_VE, source.token_ids
            rows_VE = self.model.restrict(head_VE) if token_ids is None else head_VE[token_ids]
            self._head = source, rows_VE.to(self.parameters[0].dtype)
        return self._head[1]

    def release(self) -> None:
        self._head = None

    def tensors(self) -> dict[str, Tensor]:
        """Weights and Adam's moments, not copies."""
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        return trained_tensors("drafter", self.optimizer, trained)

    def shared_tensors(self) -> list[Tensor]:
        """In a fixed order, with step counts (on the CPU). Creates missing moments."""
        tensors: list[Tensor] = []
        for parameter in self.parameters:
            state = adam_state(self.optimizer, parameter)
            tensors += [parameter.data, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        return tensors
