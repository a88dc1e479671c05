"""Drafter training: one optimizer step on one packed batch. The target is packed, has no gradients, and is
only read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.model import DraftModel
from tlt.drafter.shape import training_capture
from tlt.drafter.training.buffer import PackedBatch
from tlt.drafter.training.lesson import Lesson, Preset
from tlt.models.adam import adam_state, trained_tensors
from tlt.models.packed import PackedTransformer


@dataclass(frozen=True)
class _Source:
    """What the target's rows are made of. token_ids: as in `DrafterTrainer`."""

    version: int
    head_VE: Tensor
    token_ids: Tensor | None

    def is_same(self, other: _Source) -> bool:
        """Returns whether both have the same policy and the very same tensors."""
        same = self.head_VE is other.head_VE and self.token_ids is other.token_ids
        return same and self.version == other.version


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
        self._head: tuple[_Source, Tensor] | None = None  # made for this policy and vocabulary

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
        """Returns the preset's loss. The batch may lie on another device. What the loss draws depends on the
        tokens trained on so far alone, so that a resumed training goes on as it would have."""
        model, target_VE = self.model, self._target_head()
        dtype, device = self.parameters[0].dtype, self.parameters[0].device
        lesson = Lesson(
            token_ids_N=batch.token_ids_N.to(device),
            captured_NF=batch.captured_NF.to(device, dtype),
            lengths=batch.lengths,
            weight_M=batch.weight_M,
            embed=lambda token_ids: self.target.embed(token_ids).to(dtype),
            head_VE=model.lm_head.weight if model.config.owns_head else target_VE,
            target_VE=target_VE,
            token_ids=self.token_ids,
            seed=self.num_tokens,
        )
        return self.preset.loss(model, lesson)

    def _target_head(self) -> Tensor:
        """Returns the target's rows of the draft vocabulary in the drafter's type. Their copy is kept until
        the policy or the vocabulary changes, or `release`."""
        source = _Source(self.target.version, self.target.head_VE, self.token_ids)
        if self._head is None or not source.is_same(self._head[0]):
            self._head = None  # not two copies at a time
            head_VE, token_ids = source.head_VE, source.token_ids
            rows_VE = self.model.restrict(head_VE) if token_ids is None else head_VE[token_ids]
            self._head = source, rows_VE.to(self.parameters[0].dtype)
        return self._head[1]

    def release(self) -> None:
        """Gives back the memory of what is made anew for the next step."""
        self._head = None

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
