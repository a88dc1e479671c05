"""The sizes in a memory plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tlt.base.config.schema import Config
from tlt.base.speculation import Off
from tlt.base.types import resolve_dtype
from tlt.drafter.forms import new_model
from tlt.drafter.shape import DrafterShape
from tlt.models.decoder import ModelConfig
from tlt.models.hf.weights import count_parameters, largest_tensor
from tlt.models.lora import count_adapters
from tlt.training.build.policy import base_dtype, master_dtype
from tlt.training.ranks.sharding import choose_layout

GIB = 2**30
META = torch.device("meta")


@dataclass(frozen=True)
class PlannedRun:
    """rank_bytes: memory of a rank's GPU, or its share of a CPU machine; None: unknown.
    longest_prompt: in tokens.
    num_sharing: ranks that share a CPU machine's memory; on GPUs, 1.
    """

    config: Config
    model: ModelConfig
    drafter: DrafterShape | None
    num_ranks: int
    is_gpu: bool
    rank_bytes: int | None
    longest_prompt: int
    num_sharing: int = 1

    def changed(self, changes: dict[str, Any]) -> PlannedRun:
        """A changed run.num_ranks means a single machine, whose memory ranks on CPUs share."""
        config, num = self.config, changes.get("run.num_ranks", self.num_ranks)
        is_one_machine = self.is_gpu or self.num_sharing == self.num_ranks
        if isinstance(num, int) and num != self.num_ranks and is_one_machine:
            each = self.rank_bytes
            if each is not None and not self.is_gpu:
                each = each * self.num_sharing // num
            sharing = 1 if self.is_gpu else num
            return replace(self, num_ranks=num, rank_bytes=each, num_sharing=sharing).changed(changes)
        for key, value in changes.items():
            section, name = key.split(".")
            part = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: part})
        return replace(self, config=config)

    @property
    def is_sharded(self) -> bool:
        wanted, device = self.config.parallel.policy, "cuda" if self.is_gpu else "cpu"
        return choose_layout(wanted, self.num_ranks, device).is_sharded

    @property
    def num_slices(self) -> int:
        return self.num_ranks if self.is_sharded else 1

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model)

    @property
    def largest_tensor(self) -> int:
        """Numbers of the largest tensor: an embedding, or all experts of a layer."""
        return largest_tensor(self.model)

    @property
    def trained_bytes(self) -> int:
        lora = self.config.lora
        num_trained = count_adapters(self.model, lora) if lora.is_used else self.num_parameters
        return num_trained * master_dtype(self.config).itemsize

    @property
    def engine_dtype(self) -> torch.dtype:
        return resolve_dtype(self.config.run.dtype, "cuda" if self.is_gpu else "cpu")

    @property
    def frozen(self) -> int:
        return base_dtype(self.config).itemsize

    @property
    def computed(self) -> int:
        given = self.config.parallel.param_dtype
        return resolve_dtype(given).itemsize if given is not None and self.is_sharded else self.frozen

    @property
    def longest(self) -> int:
        return min(self.longest_prompt + self.config.sampling.max_tokens, self.model.max_positions)

    @property
    def num_responses(self) -> int:
        rollout, evaluation = self.config.rollout, self.config.evaluation
        step = rollout.problems_per_step * rollout.samples_per_problem
        return max(step, evaluation.num_problems * evaluation.num_samples)

    @property
    def num_slots(self) -> int:
        return min(self.config.rollout.max_batch_size, self.num_responses)

    @property
    def num_parked(self) -> int:
        """Responses that may wait for their environment at once; their caches stand beside the slots'."""
        parks = self.config.environment.is_used and not self.uses_vllm
        return -(-self.num_responses // self.num_ranks) if parks else 0

    @property
    def uses_vllm(self) -> bool:
        return self.config.rollout.engine == "vllm"

    @property
    def updates_by_rows(self) -> bool:
        return self.config.run.equal_rows and not self.is_gpu and not self.uses_vllm

    @property
    def drafts_by_learned(self) -> bool:
        return self.drafter is not None and not isinstance(self.config.rollout.speculation, Off)

    @property
    def drafter_parameters(self) -> int:
        return 0 if self.drafter is None else count_drafter(self.drafter)


@lru_cache
def count_drafter(drafter: DrafterShape) -> int:
    with META:
        return sum(p.numel() for p in new_model(drafter).parameters() if p.requires_grad)


def short_count(number: int) -> str:
    """12 · 3.1 k · 1.6 M · 7.6 B"""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
