"""The rewards' keys: which functions score a response, and who computes them. Does not know what a
function says."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from tlt.config.mistakes import mistake
from tlt.config.section import Section, split_words
from tlt.kinds import AnyFloat, Seconds, Workers


class RewardsSection(Section):
    """The score of a response, and the worker processes that compute it while others still generate
    (docs/tasks.md)."""

    functions: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), BeforeValidator(split_words)
    ] = ()
    """Reward functions in TRL's signature as "package.module:object", and "task" for the task's own score;
    none: that alone. On the command line with commas between."""
    weights: Annotated[
        tuple[Annotated[AnyFloat, Field(strict=False)], ...],
        Field(strict=False),
        BeforeValidator(split_words),
    ] = ()
    """Weights of the functions in the sum that is the reward, with commas between on the command line;
    none: 1 each."""
    solved_at: AnyFloat = 1.0
    """A response is solved from this reward on, where "task", which says so itself, is not among the
    functions."""
    num_workers: Workers = 1
    """Worker processes of each rank that score responses; 0: the rank scores itself, without time-out, as
    in a notebook."""
    timeout_seconds: Seconds = 10.0
    """Time limit of scoring one response; past it another worker tries once more, and then the response
    has no score, for a reason that is recorded."""

    @model_validator(mode="after")
    def _a_weight_for_each(self) -> RewardsSection:
        if self.weights and len(self.weights) != len(self.functions):
            raise mistake(
                f"weights has {len(self.weights)} values for {len(self.functions)} functions: give each its "
                "weight"
            )
        if len(set(self.functions)) < len(self.functions):
            raise mistake(f"functions names one twice ({', '.join(self.functions)}): give it once")
        return self
