"""What a vLLM of ours is started with: values alone, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tlt.config.vllm import VllmSection
from tlt.vllm.inside.law import DEFAULT_TAU
from tlt.vllm.transfer import Way, choose_way

CPU_KV_GIB = 1.0
"""GiB for keys and values where nobody says how much, on a CPU."""


@dataclass(frozen=True)
class VllmSettings:
    """Says what vLLM is started with.

    model: a checkpoint folder.
    dtype: of weights and activations, as torch names it.
    max_batch_size: sequences at a time.
    window: positions of the longest, prompt included.
    kv_gib: GiB for keys and values; None: vLLM's own share of a GPU, and 1 GiB on a CPU.
    section: the user's own settings of vLLM.
    drafter: {"method": …} as vLLM's speculative_config has it, without a length; None: no speculation.
    depths: numbers of tokens that may be drafted at a time, rising from 0.
    tau: the drafter's temperature (LawTable).
    captures: whether features are kept for the drafter's training.
    own_process: whether the worker is a process of its own even on one device (`needs_own_process`).
    device_index: of the GPU that is this process's; vLLM takes its share of all, counted from there.
    """

    model: Path
    dtype: torch.dtype
    max_batch_size: int
    window: int
    kv_gib: float | None = None
    section: VllmSection = field(default_factory=VllmSection)
    drafter: Mapping[str, Any] | None = None
    depths: tuple[int, ...] = (0,)
    tau: float = DEFAULT_TAU
    captures: bool = False
    own_process: bool = False
    device_index: int = 0

    @property
    def max_depth(self) -> int:
        return self.depths[-1]

    @property
    def is_in_process(self) -> bool:
        return self.section.tensor_parallel == 1 and not self.own_process

    @property
    def way(self) -> Way:
        """How weights reach the workers. UserError where they cannot go as the user asks."""
        return choose_way(
            self.section, is_cuda=torch.cuda.is_available(), has_own_worker=not self.is_in_process
        )
