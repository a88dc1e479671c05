"""The learned drafter inside vLLM, and a copy in our own layout, which is measured.

trainer ─▶ load ─┬▶ the copy           new policy ─▶ its head ─▶ the head's rows in an EAGLE-3 drafter
                 └▶ vLLM's drafter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt.drafter.formats.export import export_drafter
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.drafter.model import PackedDrafter, draft_token_ids
from tlt.drafter.protocol import Drafting
from tlt.drafter.shape import DrafterShape
from tlt.engine.vllm.strategies import check_form
from tlt.models.packed import HEAD

Push = Callable[[Mapping[str, Tensor]], None]

_NEVER_TRAINED = ("d2t", "t2d")
"""Maps between draft and target vocabulary."""


class VllmDrafter(Drafting):
    vocabulary_choice = None

    def __init__(self, model: PackedDrafter, stored: StoredDrafter, push: Push, head: str) -> None:
        """push: sends tensors to vLLM's drafter, by vLLM's names.
        head: name of the target's head, or of the embedding tied to it."""
        self.model, self.push = model, push
        shape = stored.config
        has_rows = shape.method == "eagle3" or shape.is_reduced
        self._head = head if has_rows and not shape.owns_head else None
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
        """Requests may be running."""
        self.model.load(tensors, version)
        self.push({name: tensor.detach() for name, tensor in tensors.items() if name not in _NEVER_TRAINED})

    def note(self, part: Mapping[str, Tensor]) -> None:
        """Keeps the head's rows that the drafter uses."""
        if self._head is not None and self._head in part:
            head_VE = part[self._head].detach()
            token_ids = self._token_ids
            self._rows = head_VE.clone() if token_ids is None else head_VE[token_ids.to(head_VE.device)]

    def follow(self) -> None:
        """Pushes the head of the loaded policy."""
        if self._rows is not None:
            self.push({HEAD: self._rows})
            self._rows = None


def export_for_vllm(stored: StoredDrafter, target: DescribedTarget, folder: Path) -> dict[str, Any]:
    """The drafter's part of vLLM's speculative_config, a block drafter's with its length."""
    method = stored.config.method
    check_form(method)
    export_drafter(stored, f"vllm-{method}", target, folder)
    length = {"num_speculative_tokens": stored.config.max_depth} if method == "dflash" else {}
    return {"method": method, "model": str(folder), **length}
