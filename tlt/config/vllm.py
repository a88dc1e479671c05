"""The section [vllm]: what vLLM is started with where it is the rollout's engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tlt.config.section import Section
from tlt.kinds import Processes
from tlt.speculative.strategy import Strategy


class VllmSection(Section):
    """Settings of vLLM, where rollout.engine is vllm."""

    tensor_parallel: Processes = 1
    """For vLLM: devices that one engine is spread over."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=Strategy.MAX_DEPTH)] = 8
    """For vLLM: tokens that it drafts at a time, at most; adaptive speculation chooses a number up to this
    at every step."""
    compile: bool = True
    """For vLLM: whether it compiles the model, and on GPUs captures graphs; it then starts later and
    generates faster."""
    own_process: bool = False
    """For vLLM: whether its worker is a process of its own even on one device, as it is with several
    ranks. What the target computed is not captured for the drafter's training then, and computed again."""
    prefix_caching: bool = True
    """For vLLM: whether it reads what several prompts begin with once. What it has cached is not captured
    for the drafter's training; that is then computed again."""
    transfer: Literal["auto", "host", "ipc"] = "auto"
    """For vLLM: how weights reach a worker that is a process of its own. ipc: it reads them in the memory
    of the GPU that it shares with the trainer, by vLLM's own weight transfer. host: through the machine's
    memory. auto: ipc where that can be."""
