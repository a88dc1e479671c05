"""Publishes a drafter from its trainer to the engine, or restores the last finite version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tlt.drafter.drafting.learned.vocabulary_choice import VocabularyChoice
from tlt.drafter.model import PackedDrafter
from tlt.drafter.training.trainer import DrafterTrainer


class EngineDrafter(Protocol):
    @property
    def vocabulary_choice(self) -> VocabularyChoice | None:
        """None: the draft vocabulary is fixed."""

    @property
    def model(self) -> PackedDrafter: ...

    @property
    def version(self) -> int: ...

    def load(self, tensors: dict[str, Tensor], version: int) -> None: ...


class Publisher:
    """average: `average_weighted` over the ranks."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        served: EngineDrafter,
        average: Callable[[Sequence[Tensor], float], float],
    ) -> None:
        self.trainer, self.served, self.average = trainer, served, average
        self.keep()

    def keep(self) -> None:
        self._kept = [tensor.clone() for tensor in self.trainer.shared_tensors()]
        self._kept_tokens = self.trainer.num_tokens
        self._kept_version = self.served.version

    def publish(self, num_tokens: int, version: int) -> bool:
        """Loads the ranks' mean, weighted by training tokens. Returns False, and changes nothing, if no rank
        trained. Raises FloatingPointError if the mean is not finite."""
        shared = self.trainer.shared_tensors()
        if self.average(shared, num_tokens) == 0:
            return False
        if not all(bool(tensor.isfinite().all()) for tensor in shared):
            raise FloatingPointError("its weights are not finite after training")
        self.served.load(self.trainer.model.state_dict(), version)
        self.keep()
        return True

    def undo(self, version: int) -> None:
        """Restores trainer, optimizer and engine. version: the latest in any rank's engine; if it is newer
        than the copy, the engines load the copy as `version + 1`."""
        for tensor, kept in zip(self.trainer.shared_tensors(), self._kept, strict=True):
            tensor.copy_(kept)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.trainer.num_tokens = self._kept_tokens
        if version != self._kept_version:
            self.served.load(self.trainer.model.state_dict(), version + 1)
            self._kept_version = version + 1
