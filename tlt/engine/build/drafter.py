"""Builds the copy of a drafter that is trained, and its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tlt.base.spans import Span
from tlt.base.types import Rollout
from tlt.drafter.formats.folder import StoredDrafter, choose_preset
from tlt.drafter.forms import new_model
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import BlockShape, DrafterShape
from tlt.drafter.training.buffer import BUFFER_BYTES, TrajectoryBuffer
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import count_tokens, mask_token
from tlt.models.target import Target


def build_draft_model(drafter: StoredDrafter, device: torch.device) -> DraftModel:
    model = new_model(drafter.config).to(device)
    model.load_state_dict(drafter.tensors)
    return model


def new_draft_model(
    shape: DrafterShape, target: Target, rollouts: Sequence[Rollout], seed: int
) -> DraftModel:
    """A block's masks look like a token that the rollouts do not use."""
    if isinstance(shape, BlockShape):
        said = (token for one in rollouts for token in (*one.prompt_ids, *one.token_ids))
        counts_V = count_tokens(said, target.config.vocab_size)
        shape = replace(shape, mask_token_id=mask_token(counts_V, target.embedding_VE))
    return new_model(shape).initialize(seed).to(target.device)


def build_spot_trainer(
    learning_rate: float,
    stored: StoredDrafter,
    model: DraftModel,
    target: Target,
    seed: int,
    on_span: Callable[[Span], None],
) -> SpotTrainer:
    """seed: of the windows it draws; differs by rank."""
    trainer = DrafterTrainer(model, target, choose_preset(None, stored), learning_rate)
    return SpotTrainer(trainer, TrajectoryBuffer(BUFFER_BYTES, seed), on_span=on_span)
