"""What a run computes with on one rank: policy trainer, engine, and training of the drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt.base.config.drafter import DrafterSection
from tlt.base.config.schema import Config
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.drafting.retrieval.suffix_index import count_retrieved
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.measure import DrafterCopies
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.drafter import build_draft_model, build_spot_trainer
from tlt.engine.build.engine import build_backend, load_stored_drafter
from tlt.engine.build.model import Model, drafter_folder
from tlt.engine.own.engine import RolloutEngine
from tlt.models.equal_rows import multiplied_by
from tlt.training.build.layout import engine_dtype, layout_of
from tlt.training.build.policy import build_policy_trainer
from tlt.training.build.run_engine import engine_settings
from tlt.training.idle.choice import IdleChoice
from tlt.training.idle.drafter_training import LearnedDrafterTraining, Ranks
from tlt.training.idle.protocol import DrafterTraining
from tlt.training.idle.work import build_idle_choice
from tlt.training.ranks.world import World, average_weighted, broadcast_json, gather_objects, refuse_together
from tlt.training.report.timeline import Timeline
from tlt.training.update.update import PolicyTrainer


@dataclass(frozen=True)
class RunModels:
    """references: responses that are drafted from; engine and loop share them."""

    trainer: PolicyTrainer
    engine: RolloutBackend
    drafter_training: DrafterTraining
    references: References
    idle_choice: IdleChoice

    def tensors(self) -> dict[str, Tensor]:
        return {**self.trainer.tensors(), **self.drafter_training.tensors()}

    def counters(self) -> dict[str, Any]:
        return {
            "policy": self.trainer.counters(),
            "drafter": self.drafter_training.counters(),
            "idle": self.idle_choice.counters(),
        }

    def own_counters(self) -> dict[str, Any]:
        tuner, drafter = self.engine.tuner, self.engine.drafter
        return {
            "drafter": self.drafter_training.own_counters(),
            "tuner": {} if tuner is None else tuner.counters(),
            "drafting": {} if drafter is None else drafter.counters(),
        }

    def restore(self, counters: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
        """After the tensors have been filled. own: this rank's, then those of ranks that no longer exist."""
        self.trainer.restore(counters["policy"])
        self.drafter_training.restore(counters["drafter"], own[0]["drafter"])
        self.idle_choice.restore(counters["idle"])
        if self.engine.tuner is not None:
            self.engine.tuner.restore(own[0]["tuner"])
        if self.engine.drafter is not None:
            self.engine.drafter.restore([known["drafting"] for known in own])


def build_models(
    config: Config, model: Model, world: World, timeline: Timeline, longest_prompt: int
) -> RunModels:
    stored = load_stored_drafter(drafter_folder(config), model)
    window = longest_prompt + config.sampling.max_tokens
    settings = replace(engine_settings(config, world.device), window=window)
    references = References()
    ahead, compares = config.rollout.steps_ahead > 0, config.rollout.compares_idle_work
    idle_choice = build_idle_choice(world, timeline.epoch.machine, ahead, config.drafter.train, compares)
    engine = build_backend(model, settings, stored, on_span=timeline.add, references=references)
    target = None
    if config.run.equal_rows and isinstance(engine, RolloutEngine) and world.device.type == "cpu":
        check_same_products(world, engine_dtype(config))
        target = engine.target
    trainer = build_policy_trainer(config, model, world, layout_of(config).is_sharded, target)
    drafter_training = build_drafter_training(
        config.drafter, stored, engine, world, timeline, seed=config.run.seed
    )
    return RunModels(trainer, engine, drafter_training, references, idle_choice)


def check_same_products(world: World, dtype: torch.dtype) -> None:
    """Raises UserError on all ranks if machines differ in what they multiply by."""
    here = multiplied_by(dtype)
    first = broadcast_json(world, here)
    mistake = (
        f"run.equal_rows: {here}, but {first} on rank 0; give processors of one kind, or float32, or false"
    )
    refuse_together(world, None if here == first else mistake)


def build_drafter_training(
    settings: DrafterSection,
    stored: StoredDrafter | None,
    engine: RolloutBackend,
    world: World,
    timeline: Timeline,
    *,
    seed: int,
    share: float = 0.0,
) -> DrafterTraining:
    """Does nothing where the engine has no learned drafter.

    seed: of the training windows, which differ by rank.
    share: see LearnedDrafterTraining.
    """
    drafter, target = engine.drafter, engine.target
    if stored is None or drafter is None or drafter.learned is None:
        return DrafterTraining()
    assert target is not None, "an engine with a learned drafter keeps the policy for it"
    model = build_draft_model(stored, world.device)
    spot = None
    if settings.train:
        seed = seed * world.world_size + world.rank
        spot = build_spot_trainer(settings.learning_rate, stored, model, target, seed, timeline.add)
    copies = DrafterCopies(model, drafter.learned.model, target, count_retrieved)
    ranks = Ranks(world.rank, partial(gather_objects, world), partial(average_weighted, world))
    return LearnedDrafterTraining(copies, drafter.learned, spot, ranks, timeline, share=share)
