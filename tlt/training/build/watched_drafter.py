"""Builds a run's WatchedDrafter."""

from __future__ import annotations

from functools import partial

from tlt.base.config.drafter import DrafterSection
from tlt.drafter.drafting.retrieval.suffix_index import count_retrieved
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.measure import DrafterCopies
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.drafter import build_draft_model, build_spot_trainer
from tlt.training.ranks.world import World, average_weighted, gather_objects
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.protocol import DrafterTraining
from tlt.training.rollout.watched_drafter import Ranks, WatchedDrafter


def watch_drafter(
    settings: DrafterSection,
    stored: StoredDrafter | None,
    engine: RolloutBackend,
    world: World,
    timeline: Timeline,
    *,
    seed: int,
    share: float = 0.0,
) -> DrafterTraining:
    """Returns a DrafterTraining that does nothing where the engine has no learned drafter.

    seed: of the training windows, which differ by rank.
    share: see WatchedDrafter.
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
    return WatchedDrafter(copies, drafter.learned, spot, ranks, timeline, share=share)
