"""vLLM's scheduler, with a draft length set before every step and counts of what a step verified.

A chosen length is drafted at its step's end and verified in the next (one later under asynchronous
scheduling): verified lengths come from the scheduler's output.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tlt.engine.vllm.inside.verified import Verified


class LengthScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_to_draft: int = self.num_spec_tokens
        """Draft length of every request at the next step's end."""
        self.verified: dict[str, Verified] = {}
        """Drafts that the last finished step verified, by request."""
        self.num_preempted = 0
        """Preemptions since Link.take_preemptions."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        lengths: list[int] | None = self.dynamic_sd_lookup
        if lengths is not None:
            lengths[:] = [self.num_to_draft] * len(lengths)
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rows, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        self.verified = {
            request_id: Verified(draft, len(sampled[rows[request_id]]) - 1)
            for request_id, draft in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        return super().update_from_output(scheduler_output, model_runner_output)
