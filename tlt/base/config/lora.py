"""The section [lora]."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tlt.base.config.mistakes import mistake
from tlt.base.config.section import Section, split_words
from tlt.base.value_types import PositiveFloat, Rank

ALL_LINEAR = "all-linear"


class LoraSection(Section):
    """LoRA: the policy's weights are frozen, and only low-rank adapters beside its matrices are trained
    (docs/lora.md)."""

    rank: Rank = 0
    """Rank of the adapters, as PEFT's r; 0: no adapters, the whole policy is trained."""
    alpha: PositiveFloat = 32.0
    """Weight of the adapters, as PEFT's lora_alpha: a matrix W becomes W + alpha / rank × B A."""
    rslora: bool = False
    """Whether the weight is alpha / sqrt(rank) instead (rank-stabilized LoRA, PEFT's use_rslora): a higher
    rank then learns no more slowly."""
    targets: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(strict=False, min_length=1),
        BeforeValidator(split_words),
    ] = (ALL_LINEAR,)
    """Matrices that get an adapter, in every decoder layer, by the names of PEFT's target_modules, such as
    q_proj, and of its target_parameters, such as experts.down_proj; on the command line with commas between.
    all-linear: every matrix of attention and MLPs, those of experts included; routers have none."""
    base_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type that the frozen weights are kept in and the update computes in; adapters, their
    gradients and their optimizer stay in float32. bfloat16 suits a model that is stored in it. None:
    float32 (float64 if run.dtype is)."""

    @property
    def is_used(self) -> bool:
        return self.rank > 0

    @property
    def description(self) -> str:
        return f"LoRA of rank {self.rank} on {', '.join(self.targets)}"

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @model_validator(mode="after")
    def _is_on_where_it_is_described(self) -> LoraSection:
        fields = type(self).model_fields.items()
        changed = next((name for name, field in fields if getattr(self, name) != field.default), None)
        if changed is not None and not self.is_used:
            told = f"{changed} is set but rank is 0, so that there are no adapters"
            raise mistake(f"{told}: set rank, or remove {changed}")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise mistake(f"targets names {ALL_LINEAR}, which is every matrix, and others: give it alone")
        if len(set(self.targets)) < len(self.targets):
            raise mistake(f"targets names one twice ({', '.join(self.targets)}): give it once")
        return self
