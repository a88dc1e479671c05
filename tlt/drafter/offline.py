"""Offline training of a drafter: responses of a fixed model in, a trained drafter and a summary out.

    responses ─▶ features of every token, from the target ─▶ optimizer steps on random windows, so many epochs

Does not know where responses come from, nor where the drafter is stored.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.buffer import TrajectoryBuffer
from tlt.drafter.losses import Preset
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.drafter.spot import FeatureRecompute
from tlt.drafter.trainer import DrafterTrainer
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedTransformer
from tlt.types import Rollout

_RECOMPUTE_TOKENS = 128
"""Tokens that go through the target at a time when features are computed."""


@dataclass(frozen=True)
class OfflineSettings:
    """How long and how fast to train.

    epochs: passes over all tokens, prompts included; fractions are allowed.
    learning_rate: its highest value; it rises over the first 5 % of the tokens and falls to 0 over the second half.
    tokens_per_step: tokens of one optimizer step, at most.
    seed: of the windows that are drawn.
    temperature: at which the responses were drawn, and drafts will be judged.
    """

    epochs: float
    learning_rate: float
    tokens_per_step: int
    seed: int
    temperature: float = 1.0


@dataclass(frozen=True)
class OfflineSummary:
    """What offline training did. loss: that of the last step."""

    tokens: int
    steps: int
    seconds: float
    loss: float


def new_drafter(
    target: ModelConfig, preset: Preset, draft_vocab_size: int | None, rollouts: Sequence[Rollout], seed: int
) -> DraftModel:
    """Makes a random drafter of the preset's form for the target. With a `draft_vocab_size` it can propose only the tokens
    that the responses hold most often."""
    model = DraftModel(drafter_shape(target, preset.method, draft_vocab_size)).initialize(seed)
    if model.config.is_reduced:
        model.set_vocabulary(most_frequent(rollouts, model.config.draft_vocab_size, target.vocab_size))
    return model


def most_frequent(rollouts: Sequence[Rollout], num: int, vocab_size: int) -> Tensor:
    """Returns the `num` token ids that responses hold most often, rising; among equals the lower id."""
    counts = torch.bincount(torch.tensor([token for r in rollouts for token in r.token_ids]), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:num].sort().values


def train_offline(
    model: DraftModel,
    target: PackedTransformer,
    preset: Preset,
    rollouts: Sequence[Rollout],
    settings: OfflineSettings,
    on_progress: Callable[[float, float], None],
) -> OfflineSummary:
    """Trains `model` in place on the responses, at least one of which must be `is_trainable`.

    on_progress: receives, after every step, the share of the tokens done and the loss.
    """
    buffer = TrajectoryBuffer(sys.maxsize, settings.seed)
    for rollout in rollouts:
        buffer.add(rollout)
    trainer = DrafterTrainer(model, target, preset, settings.learning_rate)
    wanted = max(int(settings.epochs * buffer.num_tokens), 1)
    begin, num_steps, loss = time.perf_counter(), 0, math.nan
    _compute_features(buffer, trainer)
    while trainer.num_tokens < wanted:
        rate = settings.learning_rate * _warm_up_and_down(trainer.num_tokens / wanted)
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate
        batch = buffer.sample(settings.tokens_per_step)
        assert batch is not None, "the buffer holds trajectories, and all have features"
        loss, num_steps = trainer.step(batch), num_steps + 1
        on_progress(trainer.num_tokens / wanted, loss)
    return OfflineSummary(trainer.num_tokens, num_steps, time.perf_counter() - begin, loss)


def _compute_features(buffer: TrajectoryBuffer, trainer: DrafterTrainer) -> None:
    """Sends every response through the target once."""
    while (trajectory := buffer.missing(trainer.target.version)) is not None:
        recompute = FeatureRecompute(trainer.target, trainer.capture, trajectory)
        while not recompute.advance(_RECOMPUTE_TOKENS):
            pass


def _warm_up_and_down(progress: float) -> float:
    """Returns the share of the highest learning rate at this share of the training."""
    return min(1.0, (progress + 0.005) / 0.05, (1.0 - progress) / 0.5 + 0.02)
