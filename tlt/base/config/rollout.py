"""The section [rollout]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from tlt.base.config.engine import EngineSection
from tlt.base.config.mistakes import mistake
from tlt.base.speculation import Adaptive, Fixed, Off, Speculation, parse_speculation
from tlt.base.types import UserError
from tlt.base.value_types import NonNegativeInt, Problems, Samples


def _read_speculation(value: Any) -> Speculation:
    if isinstance(value, Speculation):
        return value
    try:
        return parse_speculation(str(value))
    except UserError:
        remedy = "give off, adaptive or DEPTHxWIDTHxBUDGET (budget >= depth) such as 4x1x4"
        raise mistake(remedy) from None


SpeculationKey = Annotated[
    Speculation, PlainValidator(_read_speculation), PlainSerializer(str), WithJsonSchema({"type": "string"})
]


def may_use_references(speculation: Speculation, tuner: str = "cost-model") -> bool:
    match speculation:
        case Off():
            return False
        case Adaptive():
            return tuner == "cost-model"
        case Fixed(strategy):
            return strategy.uses_references


class RolloutSection(EngineSection):
    """The responses of a policy step: how many, and how they are generated."""

    problems_per_step: Problems = 8
    """Problems that each policy step answers."""
    samples_per_problem: Annotated[Samples, Field(ge=2)] = 4
    """Responses to each problem of a step, a GRPO group: advantages compare them, so at least 2."""
    speculation: SpeculationKey = Adaptive()
    """How tokens are drafted: off, adaptive (chosen at every decoding step, off included), or fixed as
    [DRAFTER:]DEPTHxWIDTHxBUDGET, such as 4x1x4. DRAFTER is learned, ngram (retrieval from the problem's own
    responses), hybrid (both), ahead (earlier responses drawn with the same noise, docs/ahead.md) or
    ahead+hybrid."""
    ahead: Literal[0, 1, 2, "adaptive"] = 0
    """Number of coming policy steps whose responses idle ranks generate ahead. When such a step comes, it
    drafts from them and draws the same tokens as without (docs/ahead.md). adaptive: two, where that saves
    more time than other uses of idle ranks."""
    tuner: Literal["cost-model", "beg-mab"] = "cost-model"
    """How adaptive speculation chooses drafts: by measured costs and acceptance (cost-model), or by the
    bandit of the TLT paper (beg-mab)."""

    router_replay: bool = False
    """Whether the update of a model with experts takes the experts that the engine took for each token (R3),
    instead of its router's own choice, which rounding may change (docs/models.md). The routes are kept with
    the responses, a byte for each. For TLT's own engine."""
    measure_speedup_every: NonNegativeInt = 5
    """Policy steps between two measurements of the speedup by speculation: the leader generates a few more
    responses with and without drafts, in at most 1 % of the rollouts' seconds; where that is too short to
    tell, the measurement waits for more steps. A shorter run measures in its last step. 0: never."""

    @property
    def steps_ahead(self) -> int:
        """`adaptive` is at most two: more gained no more (benchmarks/log.md)."""
        return 2 if self.ahead == "adaptive" else self.ahead

    @property
    def compares_idle_work(self) -> bool:
        return self.ahead == "adaptive"

    @property
    def uses_references(self) -> bool:
        return self.engine == "tlt" and may_use_references(self.speculation, self.tuner)
