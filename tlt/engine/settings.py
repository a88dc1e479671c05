"""What is asked of an engine, ours or vLLM: one record, from a configuration, options or arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from tlt.base.config.drafter import DrafterSection
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Off, Speculation
from tlt.engine.memory import automatic_bytes
from tlt.engine.sequence import Routes


@dataclass(frozen=True)
class EngineSettings:
    """tuner: of adaptive speculation, "cost-model" or "beg-mab".
    borrows: share the policy's tensors where the layout allows.
    kv_gib: of all caches; None: `automatic_bytes`, for `num_ranks` that share the machine.
    window: tokens of vLLM's longest sequence; None: the model's, as in our own engine.
    own_process: vLLM's worker is a process of its own, as several vLLMs in one process need; it captures no
        features.
    equal_rows: whether a row's bits depend on that row alone.
    routes: see `Routes` (sequence.py); our engine alone records them.
    """

    speculation: Speculation = field(default_factory=Off)
    tuner: str = "cost-model"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    max_batch_size: int = 64
    drafting: DrafterSection = field(default_factory=DrafterSection)
    borrows: bool = False
    kv_gib: float | None = None
    num_ranks: int = 1
    engine: Literal["tlt", "vllm"] = "tlt"
    vllm: VllmSection = field(default_factory=VllmSection)
    window: int | None = None
    own_process: bool = False
    equal_rows: bool = False
    routes: Routes = "none"

    def cache_bytes(self) -> int:
        device = torch.device(self.device)
        return automatic_bytes(device, self.num_ranks) if self.kv_gib is None else int(self.kv_gib * 2**30)
