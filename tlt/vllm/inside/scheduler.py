"""vLLM's scheduler with a draft length that can be set before every step, and a note of what was verified in it.

K that is chosen for a step is drafted at its end, and verified in the next one (in the one after that where vLLM schedules
asynchronously). So what a step verified is read of what it was given, and never of what was chosen.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class LengthScheduler(Scheduler):
    """Schedules by vLLM's rules. Every request drafts `num_to_draft` tokens at the end of the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_to_draft: int = self.num_spec_tokens
        self.num_verified: dict[str, int] = {}
        """Drafted tokens of each request in the step whose outputs came last."""
        self.num_preempted = 0
        """Requests that were put back for want of memory, until the engine asks for them (Link.take_preemptions)."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        lengths: list[int] | None = self.dynamic_sd_lookup
        if lengths is not None:
            lengths[:] = [self.num_to_draft] * len(lengths)
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.num_verified = {request_id: len(tokens) for request_id, tokens in drafts.items()}
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        return super().update_from_output(scheduler_output, model_runner_output)
