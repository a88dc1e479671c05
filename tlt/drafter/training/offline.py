"""Offline training of a drafter on responses of a fixed model.

responses ─▶ the target's features of every token ─▶ optimizer steps on random windows ─▶ acceptance
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

from tlt.base.types import Rollout
from tlt.drafter.forms import pack_drafter
from tlt.drafter.measure import draw_counts, engine_logits, read_sample
from tlt.drafter.model import DraftModel
from tlt.drafter.training.batch import Preset
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.spot import FeatureRecompute
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import DraftVocabulary
from tlt.models.target import Target

_RECOMPUTE_TOKENS = 128

_MEASURED_TOKENS = 2048

WEAK_ACCEPTANCE = 0.2
"""At 0.2, even an endless chain yields at most 1 / (1 - 0.2) = 1.25 tokens per verification. On the shipped
model, the shipped drafter has 0.97, random drafters 0.01 to 0.02."""


@dataclass(frozen=True)
class OfflineSettings:
    """epochs: passes over all tokens, prompts included; may be a fraction.
    learning_rate: the peak, after 5 % of the tokens; falls to 0 over the second half.
    temperature: of the responses, and of the measured acceptance.
    """

    epochs: float
    learning_rate: float
    tokens_per_step: int
    seed: int
    temperature: float = 1.0


@dataclass(frozen=True)
class OfflineSummary:
    """acceptance: on a sample of the responses (measure.py); None: all prompts have one token only.
    coverage: share of the responses' tokens in the draft vocabulary.
    """

    tokens: int
    steps: int
    seconds: float
    cpu_seconds: float
    loss: float
    acceptance: float | None
    warning: str | None
    draft_vocab: int
    coverage: float


def train_offline(
    model: DraftModel,
    target: Target,
    preset: Preset,
    rollouts: Sequence[Rollout],
    settings: OfflineSettings,
    on_progress: Callable[[float, float | None], None],
    vocabulary: DraftVocabulary | None = None,
) -> OfflineSummary:
    """Trains `model` in place, and measures it on the same responses, of which one must be `is_trainable`.

    on_progress: receives (share of tokens read by the target, None), then (share trained on, loss).
    """
    buffer = TrajectoryBuffer(sys.maxsize, settings.seed)
    for rollout in rollouts:
        buffer.add(rollout)
    token_ids = None if vocabulary is None else vocabulary.token_ids
    trainer = DrafterTrainer(model, target, preset, settings.learning_rate)
    trainer.token_ids = token_ids
    wanted = max(int(settings.epochs * buffer.num_tokens), 1)
    begin, cpu_begin, num_steps, loss = time.perf_counter(), time.process_time(), 0, math.nan
    _compute_features(buffer, trainer, on_progress)
    while trainer.num_tokens < wanted:
        rate = settings.learning_rate * _warm_up_and_down(trainer.num_tokens / wanted)
        trainer.optimizer.param_groups[0]["lr"] = rate
        batch = buffer.sample(settings.tokens_per_step, target.version)
        assert batch is not None, "all trajectories have features"
        loss, num_steps = trainer.step(batch), num_steps + 1
        on_progress(trainer.num_tokens / wanted, loss)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    rng = random.Random(settings.seed)
    acceptance = measure_acceptance(model, target, rollouts, settings.temperature, rng, token_ids)
    return OfflineSummary(
        tokens=trainer.num_tokens,
        steps=num_steps,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        loss=loss,
        acceptance=acceptance,
        warning=_warning(acceptance),
        draft_vocab=model.config.draft_vocab_size if token_ids is None else len(token_ids),
        coverage=1.0 if vocabulary is None else vocabulary.coverage(rollouts),
    )


@torch.no_grad()
def measure_acceptance(
    model: DraftModel,
    target: Target,
    rollouts: Sequence[Rollout],
    temperature: float,
    rng: random.Random,
    token_ids: Tensor | None = None,
) -> float | None:
    """Raises FloatingPointError if the drafter's outputs are not finite."""
    counts = draw_counts(rollouts, _MEASURED_TOKENS, rng)
    if not counts:
        return None
    packed = pack_drafter(model.config, model.state_dict(), target.dtype, target.device)
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
        "speed anything up; train it for more epochs, on more responses, or with smaller steps (--epochs, "
        "--samples, --tokens-per-micro-step)"
    )


def _compute_features(
    buffer: TrajectoryBuffer, trainer: DrafterTrainer, on_progress: Callable[[float, float | None], None]
) -> None:
    num_read = 0
    while (trajectory := buffer.missing(trainer.target.version)) is not None:
        on_progress(num_read / buffer.num_tokens, None)
        num_read += len(trajectory.token_ids)
        recompute = FeatureRecompute(trainer.target, trainer.capture, trajectory)
        while not recompute.advance(_RECOMPUTE_TOKENS):
            pass


def _warm_up_and_down(progress: float) -> float:
    return min(1.0, (progress + 0.005) / 0.05, (1.0 - progress) / 0.5 + 0.02)
