"""vLLM's scheduler with TLT's tuner, for a server: before every step it chooses the draft length.

schedule ─▶ choose ─▶ num_to_draft         update_from_output ─▶ seconds, accepted drafts ─▶ observe
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.logger import init_logger

from tlt.base.speculation import Adaptive
from tlt.base.strategy import Strategy
from tlt.engine.stats import EngineStats
from tlt.engine.vllm.inside.scheduler import LengthScheduler
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome
from tlt.speculation.tuner.tuner import make_tuner

logger = init_logger("vllm.tlt")


class TunedScheduler(LengthScheduler):
    """Steps do not overlap (`check_server`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        kind = "ngram" if "ngram" in config.speculative_config.method else "learned"
        lengths = config.speculative_config.num_speculative_tokens_per_batch_size
        tuner = make_tuner(
            Adaptive(),
            (kind,),
            max_depth=max(length for *_, length in lengths),
            trees=False,
        )
        assert tuner is not None, "it is adaptive"
        self.tuner = tuner
        self._now, self._next = Strategy.OFF, Choice(Strategy.OFF)  # as in engine.py
        self._began = 0.0
        self._batch: BatchState | None = None
        """The batch of this step; None: the step also reads prompts, and the tuner does not learn from it."""
        self._stats, self._said_at = EngineStats(), time.monotonic()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._began = time.perf_counter()
        is_proven = self._now == self._next.strategy  # a choice holds for two steps
        self._now = self._next.strategy
        if self.running and is_proven:
            self._next = self.tuner.choose(self._batch_state(self.running))
        self.num_to_draft = self._next.strategy.depth
        output = super().schedule(*args, **kwargs)
        drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        is_decode = all(count == 1 + len(drafts.get(name, ())) for name, count in counts.items())
        self._batch = None
        if counts and is_decode and not output.scheduled_new_reqs:
            self._batch = self._batch_state([one for one in self.running if one.request_id in counts])
        return output

    @staticmethod
    def _batch_state(requests: Sequence[Any]) -> BatchState:
        num_cached = sum(request.num_tokens for request in requests)
        return BatchState(len(requests), 0, 0, num_cached=num_cached)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rows, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        num_sampled = {name: len(sampled[row]) for name, row in rows.items()} if sampled else {}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._batch is not None:
            self._learn(self._batch, num_sampled, time.perf_counter() - self._began)
        self._say()
        return outputs

    def _learn(self, batch: BatchState, num_sampled: dict[str, int], seconds: float) -> None:
        verified = self._now
        rows = [
            (num - 1, len(self.verified[name].draft) if name in self.verified else 0)
            for name, num in num_sampled.items()
            if num and (name in self.verified or not verified.is_off)
        ]
        accepted, drafted = zip(*rows, strict=True) if rows else ((), ())
        outcome = StepOutcome(sum(num_sampled.values()), accepted, drafted, seconds)
        strategy = verified if rows else Strategy.OFF
        is_steady = strategy == self._next.strategy
        self._stats.record_step(self._next if is_steady else Choice(strategy), outcome, batch.num_running)
        if outcome.num_tokens > 0:
            drafted_next = None if is_steady else self._next.strategy
            self.tuner.observe(strategy, batch, replace(outcome, drafted_next=drafted_next))

    def _say(self) -> None:
        if time.monotonic() - self._said_at < envs.VLLM_LOG_STATS_INTERVAL:
            return
        stats, self._stats, self._said_at = self._stats, EngineStats(), time.monotonic()
        if not self.log_stats or not stats.num_steps:
            return
        shares = {name: one.seconds / stats.seconds for name, one in stats.by_strategy.items()}
        told = ", ".join(
            f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1])
        )
        logger.info("Tuner: share of the time by drafts: %s", told)
