"""A drafter's acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlt.base.strategy import Strategy
from tlt.base.types import Request, UserError
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.build.engine import build_engine, build_learned
from tlt.engine.build.model import Model
from tlt.engine.settings import EngineSettings
from tlt.speculation.tuner.tuner import Fixed


@dataclass(frozen=True)
class ChainAcceptance:
    num_verifications: int
    accept_length: float
    """Tokens committed per verification, the target's own token included."""
    by_position: tuple[float, ...]
    """Share of verifications whose first 1, 2, ... guesses were all accepted (unconditional, as in vLLM)."""
    draft_vocab: int
    """Size of the draft vocabulary at the end."""


def measure_chains(
    model: Model, drafter: StoredDrafter, depth: int, settings: EngineSettings, requests: Sequence[Request]
) -> ChainAcceptance:
    """Measures the acceptance of chains of `depth` guesses by position. Raises UserError where prompts and
    responses are too short for any guess."""
    tuner = Fixed(Strategy("learned", depth, 1, depth))
    engine = build_engine(model.config, model.tensors, settings, tuner=tuner)
    learned = build_learned(engine, drafter, settings)
    engine.load_drafter(learned)
    for _ in engine.generate(requests):
        pass
    stats = engine.stats
    if stats.accept_length is None:
        remedy = "give prompts of two tokens or more, or let responses be longer"
        raise UserError(f"drafter eval: not one guess was verified; {remedy}")
    by_position = tuple(stats.draft_acceptance_rate_pos)
    return ChainAcceptance(
        stats.num_verifications, stats.accept_length, by_position, learned.model.num_proposed
    )
