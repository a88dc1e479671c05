"""Drafter training in idle time (TLT, arXiv 2511.16665), in micro-steps for fast preemption.

    SpotTrainer.run(should_stop):   while not should_stop():  micro-step

A micro-step recomputes a chunk of features, or takes one optimizer step. Against overfitting, a step allows
`max_passes` passes over the responses with features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tlt.base.records import DrafterReport
from tlt.base.spans import Span, SpanName
from tlt.base.types import Rollout
from tlt.drafter.training.buffer import Trajectory, TrajectoryBuffer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.attention import cached
from tlt.models.target import Target
from tlt.speculation.law.tree import chain_mask

MIN_TOKENS = 128
"""Fewest tokens of a micro-step; its size before anything is measured."""

MICRO_STEP_SHARE = 0.005
"""Share of a step's seconds that a micro-step may take: even the longest of many waits stays below 1 %."""

_FORGETTING = 0.2


class MicroStepSize:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.seconds_per_token: float | None = None

    def num_tokens(self, step_seconds: float | None) -> int:
        fitting = 0
        if step_seconds is not None and self.seconds_per_token is not None:
            fitting = int(MICRO_STEP_SHARE * step_seconds / self.seconds_per_token)
        return min(max(fitting, MIN_TOKENS), self.max_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        measured = seconds / num_tokens
        known = measured if self.seconds_per_token is None else self.seconds_per_token
        self.seconds_per_token = known + _FORGETTING * (measured - known)


class FeatureRecompute:
    def __init__(self, target: Target, capture: tuple[int, ...], trajectory: Trajectory) -> None:
        self.target, self.capture, self.trajectory = target, capture, trajectory
        self.version, c = target.version, target.config
        shape = (c.num_layers, 1, 2 * c.num_kv_heads, trajectory.num_usable, c.head_dim)
        self.layers = list(torch.zeros(shape, dtype=target.dtype, device=target.device))
        self.chunks: list[Tensor] = []
        self.done = 0

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> bool:
        end = min(self.done + num_tokens, self.trajectory.num_usable)
        columns_1T = torch.arange(self.done, end, device=self.target.device)[None]
        mask = chain_mask(columns_1T, end, self.target.dtype)
        attend = cached(self.target.config, self.layers, columns_1T, end, mask)
        tokens_T = torch.tensor(self.trajectory.token_ids[self.done : end], device=self.target.device)
        self.chunks.append(self.target.forward_capturing(tokens_T, columns_1T[0], attend, self.capture)[1])
        self.done = end
        if end < self.trajectory.num_usable:
            return False
        self.trajectory.features_TF, self.trajectory.is_captured = torch.cat(self.chunks), False
        self.trajectory.policy_version = self.version
        return True


MAX_PASSES = 4.0
"""Passes within a step: seven cost accept length, about three gained (benchmarks/log.md). Not tuned."""


MICRO_STEP_TOKENS = 1024
"""Most tokens of an optimizer step; fewer where a preemption would wait too long (`MicroStepSize`)."""
CARRY_LONGEST = 64
"""Longest responses of all ranks that stay for the next step, so that little data is not learned by heart;
the buffer bounds their memory."""


class SpotTrainer:
    """Optimizer, buffer and counters persist between sessions of idle time."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        buffer: TrajectoryBuffer,
        tokens_per_micro_step: int = MICRO_STEP_TOKENS,
        carry_longest: int = CARRY_LONGEST,
        on_span: Callable[[Span], None] | None = None,
        max_passes: float = MAX_PASSES,
    ) -> None:
        self.trainer, self.buffer = trainer, buffer
        self.carry_longest, self.max_passes = carry_longest, max_passes
        self.on_span = on_span
        self.step_seconds: float | None = None  # duration of the latest step; None: before the first one ends
        self.train_size = MicroStepSize(tokens_per_micro_step)
        self.recompute_size = MicroStepSize(tokens_per_micro_step)
        self._recompute: FeatureRecompute | None = None
        self._has_recomputed = False
        self._num_predicted = 0  # response tokens trained on in this step

    def add(self, rollout: Rollout, features_TF: Tensor | None) -> None:
        self.buffer.add(rollout, features_TF)

    def run(self, should_stop: Callable[[], bool]) -> DrafterReport:
        """Ends also when there is nothing to do."""
        report, start = DrafterReport(), time.perf_counter()
        now = start
        while not (is_preempted := should_stop()):
            done = self.micro_step()
            if done is None:
                report = replace(report, is_limited=bool(self.buffer.ready(self.trainer.target.version)))
                break
            before, now = now, time.perf_counter()
            report = report.plus(replace(done, seconds=now - before, max_micro_step_seconds=now - before))
            self._note(before, now)
        self.trainer.release()
        if report.num_micro_steps == 0:
            return report
        end = time.perf_counter()
        self._note(now, end)
        return replace(report, seconds=end - start, preempted_at=end if is_preempted else None)

    def end_step(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        self._recompute, self._num_predicted = None, 0
        self.step_seconds = seconds
        self.buffer.carry_over(rollouts, self.carry_longest)

    def abandon(self) -> None:
        self._recompute, self._num_predicted = None, 0
        self.buffer.abandon()

    def micro_step(self) -> DrafterReport | None:
        """Returns a report without seconds; None: nothing to do. Recomputing alternates with training, so
        that a short idle window trains, too."""
        version = self.trainer.target.version
        if self._recompute is not None and self._recompute.version != version:
            self._recompute = None  # its chunks are another policy's
        if self._recompute is None and (stale := self.buffer.missing(version)) is not None:
            self.buffer.drop_features(stale)
            self._recompute = FeatureRecompute(self.trainer.target, self.trainer.capture, stale)
        budget = self._token_budget(version)
        recompute = None if self._has_recomputed and budget > 0 else self._recompute
        self._has_recomputed = recompute is not None
        start = time.perf_counter()
        if recompute is not None:
            done = recompute.done
            if recompute.advance(self.recompute_size.num_tokens(self.step_seconds)):
                self.buffer.renew(recompute.trajectory)
                self._recompute = None
            num_tokens = recompute.done - done
            self.recompute_size.observe(num_tokens, time.perf_counter() - start)
            return DrafterReport(1, recomputed_tokens=num_tokens)
        if budget == 0:
            return None
        batch = self.buffer.sample(budget, version)
        assert batch is not None, "something is ready"
        loss = self.trainer.step(batch)
        self._num_predicted += batch.num_predicted
        self.train_size.observe(batch.num_tokens, time.perf_counter() - start)
        return DrafterReport(1, batch.num_tokens, loss=loss, captured_tokens=batch.num_captured)

    def _token_budget(self, version: int) -> int:
        ready, wanted = self.buffer.ready(version), self.train_size.num_tokens(self.step_seconds)
        left = math.ceil(self.max_passes * sum(t.num_predicted for t in ready)) - self._num_predicted
        is_worth_a_step = left >= min(MIN_TOKENS, self.train_size.max_tokens) or self._num_predicted == 0
        return min(wanted, left) if is_worth_a_step else 0

    def _note(self, start: float, end: float) -> None:
        if self.on_span is not None:
            self.on_span(Span(SpanName.TRAIN_DRAFTER, start, end))

    # ── across restarts ─────────────────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, Any]:
        """JSON without features: their policy will have been replaced."""
        return {
            "num_tokens": self.trainer.num_tokens,
            "trajectories": [[list(t.token_ids), t.num_prompt] for t in self.buffer.trajectories],
            "step_seconds": self.step_seconds,
            "seconds_per_token": [size.seconds_per_token for size in (self.train_size, self.recompute_size)],
        }

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.trainer.num_tokens = counters["num_tokens"]
        self.buffer.restore(counters["trajectories"])
        self.step_seconds = counters["step_seconds"]
        self.train_size.seconds_per_token, self.recompute_size.seconds_per_token = counters[
            "seconds_per_token"
        ]
