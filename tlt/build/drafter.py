"""A stored drafter → the copy that is trained, and who trains it in idle time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tlt.config.drafter import DrafterSection
from tlt.drafter.formats.folder import StoredDrafter, choose_preset
from tlt.drafter.model import DraftModel
from tlt.drafter.training.buffer import TrajectoryBuffer
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.models.packed import PackedTransformer
from tlt.spans import Span


def build_draft_model(drafter: StoredDrafter, device: torch.device) -> DraftModel:
    """Returns the copy of a drafter that is trained."""
    model = DraftModel(drafter.config).to(device)
    model.load_state_dict(drafter.tensors)
    return model


def build_spot_trainer(
    settings: DrafterSection,
    stored: StoredDrafter,
    model: DraftModel,
    target: PackedTransformer,
    seed: int,
    on_span: Callable[[Span], None],
) -> SpotTrainer:
    """Returns who trains the drafter in idle time.

    model: the copy to train.  target: the engine's policy.  seed: of the windows it draws; every rank has another.
    """
    preset = choose_preset(settings.preset, stored, preset_changes(settings))
    return SpotTrainer(
        DrafterTrainer(model, target, preset, settings.learning_rate, settings.clip_grad_norm),
        TrajectoryBuffer(settings.buffer_mib * 2**20, seed),
        settings.tokens_per_micro_step,
        settings.carry_longest,
        on_span,
        keeps_captured=settings.features == "captured",
        max_passes=settings.max_passes,
    )


def preset_changes(settings: DrafterSection) -> dict[str, Any]:
    """Returns the constants of a preset that the configuration sets."""
    names = ("unrolled_steps", "step_decay", "feature_weight", "distribution_weight")
    return {name: getattr(settings, name) for name in names}
