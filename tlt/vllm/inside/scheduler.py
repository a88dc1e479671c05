"""vLLM's scheduler, with a draft length set before every step and counts of what a step verified.

A length chosen for a step is drafted at its end and verified in the next step (one later where vLLM schedules
asynchronously). So the verified lengths are read from the scheduler's output, never from the choice. A draft
that the engine gives (given.py) is verified in the coming step, in place of vLLM's own draft for the request.
All requests draft as much, and of a draft as much is verified as is worthwhile for its request (`limits`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tlt.vllm.inside.given import Room, Verified, Want


class LengthScheduler(Scheduler):
    """Schedules by vLLM's rules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_to_draft: int = self.num_spec_tokens
        """Tokens that every request drafts at the end of the next step."""
        self.limits: dict[str, int] = {}
        """Tokens of vLLM's own draft that the next step verifies at most, by request; the others': all."""
        self.verified: dict[str, Verified] = {}
        """By request: the draft that the last finished step verified."""
        self.given: dict[str, list[int]] = {}
        """Drafts for the next step to verify, by request."""
        self.followed: frozenset[str] = frozenset()
        """Requests whose given draft the last finished step verified."""
        self.num_preempted = 0
        """Preemptions since Link.take_preemptions."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        lengths: list[int] | None = self.dynamic_sd_lookup
        if lengths is not None:
            lengths[:] = [self.num_to_draft] * len(lengths)
        for request in self.running if self.limits else ():
            if (limit := self.limits.get(request.request_id)) is not None:
                request.spec_token_ids = request.spec_token_ids[:limit]
        self.followed = self._insert_given()
        return super().schedule(*args, **kwargs)

    def _insert_given(self) -> frozenset[str]:
        """Sets the given drafts on their requests, as far as there is room; returns these requests."""
        given, self.given = self.given, {}
        if not given:
            return frozenset()
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        room = Room(
            budget=self.max_num_scheduled_tokens,
            free_blocks=free_blocks // len(self.kv_cache_config.kv_cache_groups),
            block_size=self.block_size,
            lookahead=self.num_lookahead_tokens,
            vocab_size=self.vllm_config.model_config.get_vocab_size(),
        )
        wants = {}
        for request in self.running:
            draft = given.get(request.request_id, request.spec_token_ids)
            num_unread = request.num_tokens - 1 - request.num_computed_tokens
            wants[request.request_id] = Want(request.num_computed_tokens, num_unread or len(draft))
        found, room_for = set(), room.share(wants)
        for request in self.running:
            if request.request_id not in given or request.num_computed_tokens != request.num_tokens - 1:
                continue  # it still reads its prompt: all but the last token must have been computed
            draft = given[request.request_id][: room_for[request.request_id]]
            if draft and (draft := self.structured_output_manager.validate_tokens(request, draft)):
                request.spec_token_ids = draft
                found.add(request.request_id)
        return frozenset(found)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rows, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        self.verified = {
            request_id: Verified(draft, len(sampled[rows[request_id]]) - 1)
            for request_id, draft in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        self.followed &= self.verified.keys()
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        for request_id, one in self.verified.items():
            request = self.requests.get(request_id)
            if request is not None and (told := request.spec_decode_metrics) is not None:
                told.histogram += [0] * (len(one.draft) + 1 - len(told.histogram))
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Counts a verification. Of a given draft that is longer than vLLM's own may be, every token counts,
        and the positions that vLLM counts one by one."""
        most = self.num_spec_tokens
        counts = min(num_draft_tokens, most), min(num_accepted_tokens, most)
        stats = super().make_spec_decoding_stats(spec_decoding_stats, *counts, *args, **kwargs)
        if stats is not None:
            stats.num_draft_tokens += num_draft_tokens - counts[0]
            stats.num_accepted_tokens += num_accepted_tokens - counts[1]
        return stats
