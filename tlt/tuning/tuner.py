"""Tuners choose the strategy for the batch that is running now.

    Fixed        always the same
    CostModel    predicts from measured costs and measured acceptance, so that one arm informs its neighbours (cost_model.py)
    BegMab       the bandit of the TLT paper (beg_mab.py)

A decision is a pure function of the statistics (`decide`); seconds come in with the outcomes, randomness
as an argument. No tuner reads a clock or knows an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlt.speculative.strategy import BatchState, Strategy, StrategyTuner
from tlt.tuning.beg_mab import BegMab, groups_of
from tlt.tuning.cost_model import CostModel
from tlt.tuning.step_costs import UNKNOWN, CostPrior
from tlt.types import UserError


class Fixed(StrategyTuner):
    """Chooses the same strategy for every batch."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def choose(self, batch: BatchState) -> Strategy:
        return self.strategy


# ── the arms ────────────────────────────────────────────────────────────────────────────────────────────────

_CHAINS = (1, 2, 3, 4, 6, 8, 11, 15)
_REFERENCE_DEPTHS = (32, 64, 128, 256)
_TREES = ((3, 2, 6), (5, 2, 10), (7, 2, 14), (6, 3, 24), (10, 4, 48))


def default_arms(
    kinds: Sequence[str], max_depth: int = Strategy.MAX_DEPTH, trees: bool = True
) -> tuple[Strategy, ...]:
    """Returns the strategies worth trying with drafters of these kinds: off, chains, long ones along
    references, and trees where candidates are ranked.

    max_depth, trees: how deep an engine can draft, and whether drafts may branch there.
    """
    arms = [Strategy.OFF]
    for kind in kinds:
        uses_references = Strategy(kind, 1, 1, 1).uses_references
        if "hybrid" in kinds and kind in ("ahead+learned", "ahead+ngram"):
            continue  # ahead+hybrid takes the better of the two
        depths = _REFERENCE_DEPTHS if uses_references else _CHAINS[3:] if kind == "hybrid" else _CHAINS
        arms += [Strategy(kind, depth, 1, depth) for depth in depths]
    if "learned" in kinds and trees:
        arms += [Strategy("learned", *shape) for shape in _TREES]
    return tuple(arm for arm in arms if arm.uses_references or arm.depth <= max_depth)


def make_tuner(
    speculation: str,
    kinds: Sequence[str],
    name: str = "cost-model",
    max_depth: int = Strategy.MAX_DEPTH,
    trees: bool = True,
    prior: CostPrior = UNKNOWN,
    has_hindsight: bool = True,
    acceptance: float | None = None,
) -> StrategyTuner | None:
    """Makes the tuner that the user asked for.

    speculation: `off`, `adaptive` or [drafter:]DEPTHxWIDTHxBUDGET. For `off` the result is None: nothing
        drafts.
    kinds: the drafters that exist, the preferred one first.
    name: the tuner behind `adaptive`, cost-model or beg-mab.
    max_depth, trees: what the engine can draft (`default_arms`).
    prior: the drafter's size beside the target's.
    has_hindsight: whether the engine says what retrieval would have drafted.
    acceptance: the rate that the learned drafter's folder records; None: none. Raises UserError for a
        strategy whose drafter does not exist.
    """
    if speculation == "off":
        return None
    if speculation != "adaptive":
        strategy = Strategy.parse(speculation, kinds[0])
        if strategy.is_off or strategy.drafter not in kinds:
            raise UserError(
                f"speculation: {speculation!r} needs a drafter of kind {strategy.drafter}; there is "
                f"{', '.join(kinds)}"
            )
        return Fixed(strategy)
    arms = default_arms(kinds, max_depth, trees)
    if name == "beg-mab":
        return BegMab(groups_of(arms))
    assert name == "cost-model", name
    return CostModel(arms, prior=prior, has_hindsight=has_hindsight, acceptance=acceptance)
