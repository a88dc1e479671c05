"""The learned drafter that vLLM drafts with, beside a copy of it in our own layout, which is measured.

    trainer ─▶ load ─┬▶ the copy           a policy is published ─▶ its head ─▶ the rows that an EAGLE-3 drafter carries along
                     └▶ vLLM's drafter

Knows neither training nor when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from tlt.drafter.formats.export import FORMATS, Target, export_drafter
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import DrafterShape, PackedDrafter, draft_token_ids
from tlt.models.packed import HEAD
from tlt.speculative.protocol import Drafting

Push = Callable[[Mapping[str, Tensor]], None]

_OF_THE_TARGET = ("d2t", "t2d")
"""Tensors that never change while a drafter is trained."""


class VllmDrafter(Drafting):
    """Takes new weights to vLLM.

    model: the copy in our layout.  push: hands tensors to vLLM's drafter, by the names that vLLM reads.
    head: name of the target's head, or of the embedding where the two are one.
    """

    choice = None

    def __init__(self, model: PackedDrafter, stored: StoredDrafter, push: Push, head: str) -> None:
        self.model, self.push = model, push
        shape = stored.config
        self._head = head if shape.method == "eagle3" and not shape.owns_head else None
        self._token_ids = draft_token_ids(stored.tensors["d2t"]) if self._head and shape.is_reduced else None
        self._rows: Tensor | None = None

    @property
    def learned(self) -> VllmDrafter:
        return self

    @property
    def shape(self) -> DrafterShape:
        return self.model.config

    @property
    def version(self) -> int:
        return self.model.version

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        """New weights, also while requests run."""
        self.model.load(tensors, version)
        self.push({name: tensor.detach() for name, tensor in tensors.items() if name not in _OF_THE_TARGET})

    def note(self, part: Mapping[str, Tensor]) -> None:
        """Looks for the head in a part of a new policy, whose rows the drafter uses."""
        if self._head is not None and self._head in part:
            head_VE = part[self._head].detach()
            self._rows = (
                head_VE.clone() if self._token_ids is None else head_VE[self._token_ids.to(head_VE.device)]
            )

    def follow(self) -> None:
        """Takes up the head of the policy that has come in whole."""
        if self._rows is not None:
            self.push({HEAD: self._rows})
            self._rows = None


def export_for_vllm(stored: StoredDrafter, target: Target, folder: Path) -> Mapping[str, object]:
    """Writes the drafter as vLLM loads it; returns that much of vLLM's speculative_config."""
    method = stored.config.method
    name = next(name for name, form in FORMATS.items() if form.method == method and form.engine == "vLLM")
    export_drafter(stored, name, target, folder)
    return {"method": method, "model": str(folder)}
