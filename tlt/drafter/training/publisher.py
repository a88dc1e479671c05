"""Publishing a drafter: from its trainer to the engine, or back to the last version known to be finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tlt.drafter.drafting.learned.vocabulary_choice import VocabularyChoice
from tlt.drafter.model import PackedDrafter
from tlt.drafter.training.trainer import DrafterTrainer


class Served(Protocol):
    """The learned drafter as the engine has it."""

    @property
    def choice(self) -> VocabularyChoice | None:
        """Chooses the tokens that it proposes; None: they are fixed."""

    @property
    def model(self) -> PackedDrafter: ...

    @property
    def version(self) -> int: ...

    def load(self, tensors: dict[str, Tensor], version: int) -> None: ...


class Publisher:
    """Publishes and undoes the updates of a drafter.

    average: replaces tensors by their mean over the ranks, by weight, and returns the total weight; 0 changes
        nothing.
    """

    def __init__(
        self, trainer: DrafterTrainer, served: Served, average: Callable[[Sequence[Tensor], float], float]
    ) -> None:
        self.trainer, self.served, self.average = trainer, served, average
        self.keep()

    def keep(self) -> None:
        """Keeps a copy of the drafter and its optimizer, to which `undo` returns."""
        self._kept = [tensor.clone() for tensor in self.trainer.shared_tensors()]
        self._kept_tokens = self.trainer.num_tokens
        self._kept_version = self.served.version

    def publish(self, num_tokens: int, version: int) -> bool:
        """Averages the ranks' drafters, weighted by the tokens each trained on, and loads the mean into the
        engine as `version`. Returns False, and changes nothing, where no rank trained. FloatingPointError if
        the mean is not finite."""
        shared = self.trainer.shared_tensors()
        if self.average(shared, num_tokens) == 0:
            return False
        if not all(bool(tensor.isfinite().all()) for tensor in shared):
            raise FloatingPointError("its weights are not finite after training")
        self.served.load(self.trainer.model.state_dict(), version)
        self.keep()
        return True

    def undo(self, version: int) -> None:
        """Restores the trainer, its optimizer and the engine to the copy kept.

        version: the latest that any rank's engine drafts with. If it is newer than the copy, the engines load
            the copy as `version + 1`.
        """
        for tensor, kept in zip(self.trainer.shared_tensors(), self._kept, strict=True):
            tensor.copy_(kept)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.trainer.num_tokens = self._kept_tokens
        if version != self._kept_version:
            self.served.load(self.trainer.model.state_dict(), version + 1)
            self._kept_version = version + 1
