"""The section [vllm]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tlt.base.config.section import Section
from tlt.base.strategy import Strategy
from tlt.base.value_types import Processes


class VllmSection(Section):
    """vLLM's own settings, used only where rollout.engine is vllm (docs/vllm.md)."""

    tensor_parallel: Processes = 1
    """Devices that one vLLM is spread over."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=Strategy.MAX_DEPTH)] = 8
    """Most tokens that vLLM drafts at a time; adaptive speculation chooses a number up to this at every
    step."""
    compile: bool = True
    """Whether vLLM compiles the model, and captures graphs on GPUs. It then starts later and generates
    faster."""
    prefix_caching: bool = True
    """Whether vLLM reads a beginning that several prompts share only once. The features of cached tokens
    are computed again for the drafter's training instead of captured."""
    transfer: Literal["auto", "host", "ipc"] = "auto"
    """How weights reach vLLM's worker where it is a process of its own. ipc: it reads them in the memory of
    the GPU that it shares with the trainer, by vLLM's own weight transfer. host: through the machine's
    memory. auto: ipc where that is possible, else host."""
