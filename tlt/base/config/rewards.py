"""The section [rewards]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from tlt.base.config.mistakes import mistake
from tlt.base.config.section import Section, split_words
from tlt.base.value_types import AnyFloat, Seconds, Workers


class RewardsSection(Section):
    """The score of a response, and the worker processes that compute it while others still generate
    (docs/tasks.md)."""

    functions: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), BeforeValidator(split_words)
    ] = ()
    """Reward functions in TRL's signature as "package.module:object" or "FILE.py:object", and "task" for the
    task's own score; none: the task's score alone. On the command line with commas between."""
    weights: Annotated[
        tuple[Annotated[AnyFloat, Field(strict=False)], ...],
        Field(strict=False),
        BeforeValidator(split_words),
    ] = ()
    """Weights of the functions, whose weighted sum is the reward; none: 1 each. On the command line with
    commas between."""
    solved_at: AnyFloat = 1.0
    """Reward from which on a response counts as solved; not used where "task" is among the functions, for it
    says itself what is solved."""
    num_workers: Workers = 1
    """Worker processes of each rank that score responses; 0: the rank scores them itself, without a time
    limit, as in a notebook."""
    timeout_seconds: Seconds = 10.0
    """Time limit for scoring one response; reward functions, which are given a group of n, have n times as
    long. After it another worker tries once more; then there is no score, and the reason is recorded."""

    @model_validator(mode="after")
    def _a_weight_for_each(self) -> RewardsSection:
        check_weights(self.functions, self.weights)
        return self


def check_weights(functions: Sequence[str], weights: Sequence[float], prefix: str = "") -> None:
    """Raises a mistake where a function is named twice, or some have weights and others none. prefix: of the
    options' names."""
    if weights and len(weights) != len(functions):
        told = f"{prefix}weights has {len(weights)} values for {len(functions)} functions"
        raise mistake(f"{told}: give each its weight")
    if len(set(functions)) < len(functions):
        raise mistake(f"{prefix}functions names one twice ({', '.join(functions)}): give it once")
