"""Offline training of a drafter: responses of a fixed model in, a trained drafter and a summary out.

    responses ─▶ features of every token, from the target ─▶ optimizer steps on random windows ─▶ acceptance on a sample

Knows neither where responses come from nor where the drafter is stored.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.measure import draw_counts, engine_logits, read_sample
from tlt.drafter.model import DraftModel, PackedDrafter, drafter_shape
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.losses import Preset
from tlt.drafter.training.spot import FeatureRecompute
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import DraftVocabulary
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedTransformer
from tlt.types import Rollout

_RECOMPUTE_TOKENS = 128
"""Tokens that go through the target at a time when features are computed."""

_MEASURED_TOKENS = 2048
"""Response tokens on which the trained drafter is measured."""

WEAK_ACCEPTANCE = 0.2
"""Acceptance below which a drafter is called weak. At 0.2 even an endless chain yields no more than 1 / (1
- 0.2) = 1.25 tokens per verification. On the shipped model the shipped drafter has 0.97, random ones have
0.01 to 0.02."""


@dataclass(frozen=True)
class OfflineSettings:
    """The settings of offline training.

    epochs: passes over all tokens, prompts included; fractions are allowed.
    learning_rate: its highest value; it rises over the first 5 % of the tokens and falls to 0 over the second
        half.
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
    """The result of offline training.

    loss: that of the last step.
    acceptance: mean of sum_v min(p, q) over a sample of the response tokens (measure.py); None: no response
        could be measured, because all prompts have one token only.
    warning: one line for the user where the drafter came out weak; None: it did not.
    draft_vocab: tokens that it was trained and measured with.
    coverage: the part of the responses' tokens among them.
    """

    tokens: int
    steps: int
    seconds: float
    loss: float
    acceptance: float | None
    warning: str | None
    draft_vocab: int
    coverage: float


def new_drafter(target: ModelConfig, preset: Preset, seed: int) -> DraftModel:
    """Makes a random drafter of the preset's form for the target."""
    return DraftModel(drafter_shape(target, preset.method)).initialize(seed)


def train_offline(
    model: DraftModel,
    target: PackedTransformer,
    preset: Preset,
    rollouts: Sequence[Rollout],
    settings: OfflineSettings,
    on_progress: Callable[[float, float | None], None],
    vocabulary: DraftVocabulary | None = None,
) -> OfflineSummary:
    """Trains `model` in place on the responses, at least one of which must be `is_trainable`, and measures it
    on them.

    vocabulary: the tokens that it is trained to tell apart, and measured with; None: all, or its own.
    on_progress: receives the share of the tokens that the target has read, without a loss; then, after
        every step, that of the tokens trained on, and the loss.
    """
    buffer = TrajectoryBuffer(sys.maxsize, settings.seed)
    for rollout in rollouts:
        buffer.add(rollout)
    token_ids = None if vocabulary is None else vocabulary.token_ids
    trainer = DrafterTrainer(model, target, preset, settings.learning_rate)
    trainer.token_ids = token_ids
    wanted = max(int(settings.epochs * buffer.num_tokens), 1)
    begin, num_steps, loss = time.perf_counter(), 0, math.nan
    _compute_features(buffer, trainer, on_progress)
    while trainer.num_tokens < wanted:
        rate = settings.learning_rate * _warm_up_and_down(trainer.num_tokens / wanted)
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate
        batch = buffer.sample(settings.tokens_per_step)
        assert batch is not None, "the buffer holds trajectories, and all have features"
        loss, num_steps = trainer.step(batch), num_steps + 1
        on_progress(trainer.num_tokens / wanted, loss)
    seconds = time.perf_counter() - begin
    rng = random.Random(settings.seed)
    acceptance = measure_acceptance(model, target, rollouts, settings.temperature, rng, token_ids)
    size = model.config.draft_vocab_size if token_ids is None else len(token_ids)
    coverage = 1.0 if vocabulary is None else vocabulary.coverage(rollouts)
    return OfflineSummary(
        trainer.num_tokens, num_steps, seconds, loss, acceptance, _warning(acceptance), size, coverage
    )


@torch.no_grad()
def measure_acceptance(
    model: DraftModel,
    target: PackedTransformer,
    rollouts: Sequence[Rollout],
    temperature: float,
    rng: random.Random,
    token_ids: Tensor | None = None,
) -> float | None:
    """Returns the acceptance that the engine's copy of the drafter has on a random few of the responses;
    None where none of them can be measured. FloatingPointError where the drafter's outputs are not finite."""
    counts = draw_counts(rollouts, _MEASURED_TOKENS, rng)
    if not counts:
        return None
    packed = PackedDrafter.from_tensors(model.config, model.state_dict(), target.dtype, target.device)
    if token_ids is not None:
        packed.choose(token_ids)
    sample = read_sample(rollouts, counts, target, model.config.capture, temperature)
    logits_RV = engine_logits(packed, target, sample)
    acceptance = sample.overlap(logits_RV, packed.token_ids) / len(sample.target_RV)
    if not math.isfinite(acceptance):
        raise FloatingPointError(
            "drafter training: the drafter's outputs are not finite; lower its learning rate"
        )
    return acceptance


def _warning(acceptance: float | None) -> str | None:
    if acceptance is None or acceptance >= WEAK_ACCEPTANCE:
        return None
    return (
        f"this drafter is weak: at most {acceptance:.1%} of its guesses can be accepted, so it will hardly "
        "speed anything up; "
        "train it for more epochs, on more responses, or with smaller steps (--epochs, --samples, "
        "--tokens-per-micro-step)"
    )


def _compute_features(
    buffer: TrajectoryBuffer, trainer: DrafterTrainer, on_progress: Callable[[float, float | None], None]
) -> None:
    """Sends every response through the target once."""
    num_read = 0
    while (trajectory := buffer.missing(trainer.target.version)) is not None:
        on_progress(num_read / buffer.num_tokens, None)
        num_read += len(trajectory.token_ids)
        recompute = FeatureRecompute(trainer.target, trainer.capture, trajectory)
        while not recompute.advance(_RECOMPUTE_TOKENS):
            pass


def _warm_up_and_down(progress: float) -> float:
    """Returns the share of the highest learning rate at this share of the training."""
    return min(1.0, (progress + 0.005) / 0.05, (1.0 - progress) / 0.5 + 0.02)
