"""Stands in for CUDA graphs where there is no GPU: a recording is replayed by running its function again, on the
tensors that it was recorded with. What a recording may not read, values of a later step, it does not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.models import graphs
from tlt.models.graphs import Graphs, Outputs


def record_by_running(
    function: Callable[..., Outputs], inputs: Mapping[str, Tensor], pool: Any, device: torch.device
) -> tuple[Outputs, Callable[[], None], Any]:
    """As `graphs.record`. Raises where the function waits or uploads on a pretended GPU."""
    outputs = tuple(output.clone() for output in function(**inputs))

    def replay() -> None:
        for kept, output in zip(outputs, function(**inputs), strict=True):
            kept.copy_(output)

    return outputs, replay, pool


def replay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, engines on a CPU record their forwards, and no recording uploads anything."""

    def record(
        function: Callable[..., Outputs], inputs: Mapping[str, Tensor], pool: Any, device: torch.device
    ) -> tuple[Outputs, Callable[[], None], Any]:
        def unable(*_: Any, **__: Any) -> Tensor:
            raise AssertionError("a recording uploads: its values would be those of the first step")

        def alone(**own: Tensor) -> Outputs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "tensor", unable)
                return function(**own)

        return record_by_running(alone, inputs, pool, device)

    def initialize(self: Graphs, device: torch.device) -> None:
        plain(self, device)
        self.is_on = True

    plain = Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", initialize)
    monkeypatch.setattr(graphs, "record", record)
