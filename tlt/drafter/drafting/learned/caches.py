"""Makes a drafter's cache."""

from __future__ import annotations

from tlt.drafter.block import PackedBlock
from tlt.drafter.drafting.learned.block_cache import BlockCache
from tlt.drafter.drafting.learned.draft_cache import DraftCache
from tlt.drafter.drafting.learned.pair_cache import PairCache
from tlt.drafter.eagle import PackedEagle
from tlt.drafter.model import PackedDrafter
from tlt.models.target import Target


def make_cache(
    model: PackedDrafter, target: Target, captured_size: int, window: int, max_slots: int
) -> DraftCache:
    if isinstance(model, PackedBlock):
        return BlockCache(model, target, captured_size, window, max_slots)
    assert isinstance(model, PackedEagle), model
    return PairCache(model, target, captured_size, window, max_slots)
