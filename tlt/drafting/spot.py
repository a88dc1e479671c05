"""Drafter training in idle time: one micro-step at a time, so that whoever has better work to do gets its processor back.

micro-step = recompute a chunk of features, or one optimizer step on a packed batch
SpotTrainer.run(should_stop):   while not should_stop(): micro-step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tlt.drafting.buffer import Trajectory, TrajectoryBuffer
from tlt.drafting.trainer import DrafterTrainer
from tlt.models.attention import Cached
from tlt.models.transformer import PackedTransformer
from tlt.speculative.tree import chain_mask
from tlt.types import DrafterReport, Rollout, Span

RECOMPUTE_TOKENS = 128
"""Target tokens per recomputing micro-step."""


class FeatureRecompute:
    """Recomputes one trajectory's features through the engine's copy of the target, a chunk at a time."""

    def __init__(self, target: PackedTransformer, capture: tuple[int, ...], trajectory: Trajectory) -> None:
        c = target.config
        self.capture = capture
        self.target, self.trajectory, self.version = target, trajectory, target.version
        length = trajectory.num_usable
        shape = (c.num_layers, 1, 2 * c.num_kv_heads, length, c.head_dim)
        self.layers = list(torch.zeros(shape, dtype=target.dtype, device=target.device))
        self.chunks: list[Tensor] = []
        self.done = 0

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> bool:
        """Processes the next tokens; True when the trajectory is complete (and has its features)."""
        end = min(self.done + num_tokens, self.trajectory.num_usable)
        columns_1T = torch.arange(self.done, end, device=self.target.device)[None]
        mask = chain_mask(end - self.done, columns_1T[:, 0], end, self.target.dtype)
        attend = Cached(self.target.config, self.layers, columns_1T, end, mask)
        tokens_T = torch.tensor(self.trajectory.token_ids[self.done : end])
        self.chunks.append(self.target.forward_capturing(tokens_T, columns_1T[0], attend, self.capture)[1])
        self.done = end
        if end < self.trajectory.num_usable:
            return False
        self.trajectory.features_TE = torch.cat(self.chunks)
        self.trajectory.policy_version = self.version
        return True


class SpotTrainer:
    """Trains the drafter while nothing else is to be done. Optimizer, buffer and counters live on between sessions."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        buffer: TrajectoryBuffer,
        tokens_per_micro_step: int,
        carry_longest: int = 8,
        on_span: Callable[[Span], None] | None = None,
    ) -> None:
        self.trainer, self.buffer = trainer, buffer
        self.tokens_per_micro_step, self.carry_longest = tokens_per_micro_step, carry_longest
        self.on_span = on_span
        self._recompute: FeatureRecompute | None = None
        self._has_recomputed = False

    def run(self, should_stop: Callable[[], bool]) -> DrafterReport:
        """Micro-steps until `should_stop()`, which is asked before every one of them; with nothing to train on, returns
        at once."""
        num_steps, losses, longest = 0, [], 0.0
        tokens_before, start = self.trainer.num_tokens, time.perf_counter()
        now = start
        while not should_stop():
            loss = self.micro_step()
            if loss is None:
                break
            before, now = now, time.perf_counter()
            num_steps, longest = num_steps + 1, max(longest, now - before)
            losses.append(loss)
            if self.on_span is not None:
                self.on_span(Span("train drafter", before, now))
        trained = [loss for loss in losses if loss == loss]
        mean_loss = sum(trained) / len(trained) if trained else float("nan")
        return DrafterReport(num_steps, self.trainer.num_tokens - tokens_before, now - start, mean_loss, longest)

    def carry_over(self, rollouts: Sequence[Rollout]) -> None:
        """The step is over: the longest responses of all replicas stay for the next one."""
        self._recompute = None
        self.buffer.carry_over(rollouts, self.carry_longest)

    def micro_step(self) -> float | None:
        """One unit of work: the loss of a training step, NaN for a recomputed chunk, None when there is nothing to do.

        Recomputing alternates with training on what is ready, so that a short idle window trains too.
        """
        version = self.trainer.target.version
        if self._recompute is not None and self._recompute.version != version:
            self._recompute = None  # the chunks done so far are another policy's
        if self._recompute is None and (stale := self.buffer.missing(version)) is not None:
            stale.features_TE = None
            self._recompute = FeatureRecompute(self.trainer.target, self.trainer.capture, stale)
        is_turn_to_train = self._has_recomputed and bool(self.buffer.ready(version))
        self._has_recomputed = self._recompute is not None and not is_turn_to_train
        if self._recompute is not None and not is_turn_to_train:
            if self._recompute.advance(RECOMPUTE_TOKENS):
                self._recompute = None
            return float("nan")
        batch = self.buffer.sample(self.tokens_per_micro_step, version)
        return None if batch is None else self.trainer.step(batch)
