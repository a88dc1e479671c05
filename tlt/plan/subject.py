"""The sizes that a memory plan is made of: of a model, of what a run makes of it, and of its ranks. Knows no part of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tlt.build.policy import base_dtype, master_dtype
from tlt.config.schema import Config
from tlt.drafter.model import DrafterShape, DraftModel
from tlt.models import cpu_kernels
from tlt.models.decoder import ModelConfig
from tlt.models.hf_weights import expected_shapes
from tlt.models.lora import count_adapters
from tlt.types import resolve_dtype

META = torch.device("meta")


@dataclass(frozen=True)
class Place:
    """The ranks and what each computes on, as far as memory goes.

    num_ranks: of the whole run.  num_local: on one machine.  is_sharded: whether the policy lies in slices over all of them.
    device_bytes: of a GPU, or of a machine that computes on its CPU; None: unknown.
    longest_prompt: tokens.
    """

    num_ranks: int
    num_local: int
    is_gpu: bool
    is_sharded: bool
    device_bytes: int | None
    longest_prompt: int

    @property
    def rank_bytes(self) -> int | None:
        """Memory that a rank has for itself."""
        return self.device_bytes if self.is_gpu or self.device_bytes is None else self.device_bytes // self.num_local


@dataclass(frozen=True)
class Subject:
    """The sizes that all parts are made of. Sizes of types are in bytes."""

    config: Config
    model: ModelConfig
    drafter: DrafterShape | None
    place: Place

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model)

    @property
    def num_trained(self) -> int:
        """Parameters that have a gradient: all, or LoRA's adapters."""
        lora = self.config.lora
        return count_adapters(self.model, lora) if lora.rank else self.num_parameters

    @property
    def num_slices(self) -> int:
        """Ranks over which weights, gradients and moments are cut."""
        return self.place.num_ranks if self.place.is_sharded else 1

    @property
    def engine_dtype(self) -> torch.dtype:
        return resolve_dtype(self.config.run.dtype)

    @property
    def master(self) -> int:
        """Size of a weight that is trained."""
        return master_dtype(self.config).itemsize

    @property
    def frozen(self) -> int:
        """Size of a weight that is not trained, beside LoRA's adapters."""
        return base_dtype(self.config).itemsize

    @property
    def computed(self) -> int:
        """Size of an activation of the update."""
        given = self.config.parallel.param_dtype
        return resolve_dtype(given).itemsize if given is not None and self.place.is_sharded else self.frozen

    @property
    def longest(self) -> int:
        """Tokens of the longest response with its prompt."""
        return min(self.place.longest_prompt + self.config.sampling.max_tokens, self.model.max_positions)

    @property
    def num_responses(self) -> int:
        """Responses of a step, or of an evaluation where those are more."""
        rollout, evaluation = self.config.rollout, self.config.evaluation
        step = rollout.problems_per_step * rollout.samples_per_problem
        return max(step, evaluation.num_problems * evaluation.samples_per_problem)

    @property
    def num_slots(self) -> int:
        return min(self.config.rollout.max_batch_size, self.num_responses)

    @property
    def trains_drafter(self) -> bool:
        return self.drafter is not None and self.config.drafter.train

    @property
    def rope(self) -> int:
        """Numbers in the tables of rotary positions."""
        return 2 * self.model.max_positions * self.model.head_dim

    @property
    def layer_matrices(self) -> tuple[int, ...]:
        """Sizes of a layer's matrices as the engine packs them."""
        c = self.model
        attention, mlp = c.num_heads * c.head_dim, c.intermediate_size
        return tuple(c.hidden_size * width for width in (c.num_qkv * c.head_dim, attention, 2 * mlp, mlp))

    @property
    def largest_matrix(self) -> int:
        return max(self.model.vocab_size * self.model.hidden_size, *self.layer_matrices)

    @property
    def drafter_parameters(self) -> int:
        return 0 if self.drafter is None else count_drafter(self.drafter)

    @property
    def has_cpu_layout(self) -> bool:
        """Whether the engine multiplies by matrices in oneDNN's layout."""
        return not self.place.is_gpu and cpu_kernels.has_matrices(self.engine_dtype)

    def copied_numbers(self, sizes: tuple[int, ...]) -> int:
        """Numbers that the engine holds twice: small matrices are kept in the plain layout, too."""
        if not self.has_cpu_layout:
            return 0
        return sum(size for size in sizes if size < cpu_kernels.MIN_PRODUCTS)


@lru_cache
def count_parameters(model: ModelConfig) -> int:
    return sum(shape.numel() for shape in expected_shapes(model).values())


@lru_cache
def count_drafter(drafter: DrafterShape) -> int:
    """Returns the drafter's parameters that are trained."""
    with META:
        return sum(p.numel() for p in DraftModel(drafter).parameters() if p.requires_grad)
