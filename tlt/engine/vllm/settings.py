"""What a vLLM is started with. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlt.engine.settings import EngineSettings
from tlt.engine.vllm.inside.law import DEFAULT_TAU
from tlt.engine.vllm.transfer import Way, choose_way

CPU_KV_GIB = 1.0
"""For keys and values on a CPU, where nothing else is asked for; on a GPU it is vLLM's share."""


@dataclass(frozen=True)
class VllmSettings:
    model: Path
    """A checkpoint folder."""
    asked: EngineSettings
    window: int
    """Positions of the longest sequence, prompt included."""
    drafter: Mapping[str, Any] | None = None
    """Its part of vLLM's speculative_config, a block drafter's with its length; None: no speculation."""
    depths: tuple[int, ...] = (0,)
    """Draft lengths to choose from, rising from 0."""
    tau: float = DEFAULT_TAU
    """See LawTable."""
    own_process: bool = False
    """See `needs_own_process`."""

    @property
    def max_depth(self) -> int:
        return self.depths[-1]

    @property
    def is_in_process(self) -> bool:
        return self.asked.vllm.tensor_parallel == 1 and not self.own_process

    @property
    def captures(self) -> bool:
        """Features are captured for the drafter's training."""
        return self.asked.drafting.train and self.is_in_process

    @property
    def device_index(self) -> int:
        """Of this process's GPU, or of its group of tensor_parallel GPUs."""
        return torch.device(self.asked.device).index or 0

    @property
    def way(self) -> Way:
        """How weights reach vLLM's workers. Raises UserError where the user's choice is impossible."""
        is_cuda = torch.cuda.is_available()
        return choose_way(self.asked.vllm, is_cuda=is_cuda, has_own_worker=not self.is_in_process)


def speculative_config(drafter: Mapping[str, Any] | None, depths: Sequence[int]) -> dict[str, Any] | None:
    """vLLM captures graphs for the lengths of this table by batch size, which scheduler.py overwrites. vLLM's
    second runner always drafts a block drafter's own length."""
    if drafter is None:
        return None
    return {
        **drafter,
        "num_speculative_tokens": max(depths[-1], drafter.get("num_speculative_tokens", 0)),
        "num_speculative_tokens_per_batch_size": [(i, i, depth) for i, depth in enumerate(depths, start=1)],
    }
