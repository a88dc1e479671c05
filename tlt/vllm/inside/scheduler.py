"""vLLM's scheduler, with a draft length that can be set before every step, and a note of what was verified in
it.

K that is chosen for a step is drafted at its end, and verified in the next one (in the one after that
where vLLM schedules asynchronously). So what a step verified is read of what it was given, and never of
what was chosen. A draft that the engine gives (given.py) is verified in the step that comes, in place of
what vLLM has drafted for its request.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tlt.vllm.inside.given import Room


class LengthScheduler(Scheduler):
    """Schedules by vLLM's rules. Every request drafts `num_to_draft` tokens at the end of the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_to_draft: int = self.num_spec_tokens
        self.num_verified: dict[str, int] = {}
        """Drafted tokens of each request in the step whose outputs came last."""
        self.given: dict[str, list[int]] = {}
        """Drafts of requests for the next step."""
        self.followed: frozenset[str] = frozenset()
        """Requests of which the step whose outputs came last verified what was given."""
        self.num_preempted = 0
        """Requests that were put back for want of memory, until the engine asks for them
        (Link.take_preemptions)."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        lengths: list[int] | None = self.dynamic_sd_lookup
        if lengths is not None:
            lengths[:] = [self.num_to_draft] * len(lengths)
        self.followed = self._put_in()
        return super().schedule(*args, **kwargs)

    def _put_in(self) -> frozenset[str]:
        """Lets requests verify what was given for them, as far as there is room; returns which."""
        given, self.given = self.given, {}
        if not given:
            return frozenset()
        manager, found = self.kv_cache_manager, set()
        free = manager.block_pool.get_num_free_blocks() // len(self.kv_cache_config.kv_cache_groups)
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        limits = self.max_num_scheduled_tokens, free, self.block_size, self.num_lookahead_tokens, vocab_size
        room = Room(len(self.running), *limits)
        for request in self.running:
            is_read = (
                request.num_computed_tokens == request.num_tokens - 1
            )  # all but the token that was drawn last
            draft = (
                given.get(request.request_id, [])[: room.tokens(request.num_computed_tokens)]
                if is_read
                else []
            )
            if draft := self.structured_output_manager.validate_tokens(request, draft) if draft else []:
                request.spec_token_ids = draft
                found.add(request.request_id)
        return frozenset(found)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.num_verified = {request_id: len(tokens) for request_id, tokens in drafts.items()}
        self.followed &= self.num_verified.keys()
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        return super().update_from_output(scheduler_output, model_runner_output)
