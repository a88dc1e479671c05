"""The drafter's side of a rollout phase: it is trained where a replica falls idle, and refreshed where one still generates."""

from __future__ import annotations

import time

from safetensors.torch import load, save

from tlt.distributed.mailbox import Mailbox
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.model import DraftModel


class DrafterRefresh:
    """Takes drafters from replicas that train to engines that still generate, within one rollout: at most one in `seconds`, on
    either side. What a rollout publishes is of no use to the next one, which starts with the average.

    mailbox: the run's own.
    """

    def __init__(self, mailbox: Mailbox, learned: LearnedDrafter, seconds: float) -> None:
        self.mailbox, self.learned, self.seconds = mailbox, learned, seconds

    def begin(self, rollout: str) -> None:
        """A rollout starts, under a name of its own in this run. A version is none: after an undone update it comes again."""
        self._header = f"{rollout}\n".encode()
        self._next = time.perf_counter() + self.seconds
        self.num_refreshes = 0

    def publish(self, model: DraftModel) -> None:
        """Sends the drafter, unless it holds a number that is not finite: that the end of the step deals with."""
        if self._is_due():
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            if all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                self.mailbox.send(self._header + save(tensors))

    def refresh(self) -> None:
        """Between engine steps: what the engine drafts with becomes the latest that another replica has published."""
        if self._is_due() and (message := self.mailbox.receive()) is not None and message.startswith(self._header):
            self.learned.load(load(message[len(self._header) :]), self.learned.version + 1)
            self.num_refreshes += 1

    def _is_due(self) -> bool:
        now = time.perf_counter()
        is_due = now >= self._next
        if is_due:
            self._next = now + self.seconds
        return is_due
