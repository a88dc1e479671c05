"""The section [sampling]. Commands inherit it; value types and defaults are those of SamplingParams."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tlt.base.config.section import Section
from tlt.base.types import SamplingParams
from tlt.base.value_types import MaxTokens, MinP, StopIds, StopTexts, Temperature, TopK, TopP


class LawSection(Section):
    """The law by which a token is drawn."""

    temperature: Temperature = SamplingParams.temperature
    """Sampling temperature; at 0 the most probable token is taken."""
    top_k: TopK = SamplingParams.top_k
    """Draws from this many of the most probable tokens; 0 keeps all tokens."""
    top_p: TopP = SamplingParams.top_p
    """Draws from the fewest tokens that hold this probability; 1 keeps all tokens."""
    min_p: MinP = SamplingParams.min_p
    """Drops tokens less probable than this share of the most probable one; 0 keeps all tokens."""


class SamplingSection(LawSection):
    """The sampling of training responses. RL trains on the law that it samples from, so truncation is off by
    default."""

    max_tokens: MaxTokens = SamplingParams.max_tokens
    """Length at which a response is cut off, in tokens."""
    stop: Annotated[StopTexts, Field(strict=False)] = SamplingParams.stop
    """Texts that end a response, as the model's own stop tokens do; the response keeps the text. A text that
    is a special token counts as its id. On the command line a list such as '["</answer>"]'."""
    stop_ids: Annotated[StopIds, Field(strict=False)] = SamplingParams.stop_ids
    """Token ids that end a response, beside the model's own. On the command line a list such as
    '[151643]'."""

    def params(self, seed: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        law = {name: getattr(self, name) for name in SamplingSection.model_fields}
        return SamplingParams(**law | {"stop_ids": tuple(sorted({*stop_ids, *self.stop_ids}))}, seed=seed)
