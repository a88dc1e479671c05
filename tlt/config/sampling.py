"""The section [sampling]: the law that training responses are drawn by, and where they end. Does not know how one is drawn."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tlt.config.section import Section
from tlt.kinds import MaxTokens, MinP, StopTexts, Temperature, TopK, TopP


class SamplingSection(Section):
    """The sampling of training responses. RL trains on the law it samples: truncation is off by default."""

    temperature: Temperature = 1.0
    """Sampling temperature; at 0 the most probable token is taken."""
    top_k: TopK = 0
    """Draws from this many of the most probable tokens; 0 keeps all tokens."""
    top_p: TopP = 1.0
    """Draws from the fewest tokens that hold this probability; 1 keeps all tokens."""
    min_p: MinP = 0.0
    """Drops tokens less probable than this share of the most probable one; 0 keeps all tokens."""
    max_tokens: MaxTokens = 2048
    """Length at which a training response is cut off, in tokens."""
    stop: Annotated[StopTexts, Field(strict=False)] = ()
    """Texts that end a response, which keeps them; beside the model's own stop tokens."""
