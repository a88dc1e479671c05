"""Makes the tuner, which chooses the strategy of every engine step.

    FixedTuner   always the same strategy
    CostModel    predicts every arm's speed from measured costs and acceptance (cost_model.py)
    BegMab       the bandit of the TLT paper (beg_mab.py)

No tuner reads a clock: seconds come with the outcomes of steps, randomness as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlt.base.speculation import Adaptive, Off, Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.speculation.tuner.beg_mab import BegMab, groups_of
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.protocol import BatchState, Choice, StrategyTuner


class FixedTuner(StrategyTuner):
    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def choose(self, batch: BatchState) -> Choice:
        return Choice(self.strategy)


# ── the arms ────────────────────────────────────────────────────────────────────────────────────────────────

_CHAINS = (1, 2, 3, 4, 6, 8, 11, 15)
_REFERENCE_DEPTHS = (32, 64, 128, 256)
_TREES = ((3, 2, 6), (5, 2, 10), (7, 2, 14), (6, 3, 24), (10, 4, 48))


def default_arms(
    kinds: Sequence[str],
    max_depth: int = Strategy.MAX_DEPTH,
    trees: bool = True,
    learned_depth: int = Strategy.MAX_DEPTH,
) -> tuple[Strategy, ...]:
    """max_depth: most drafting steps that the engine allows.
    trees: whether the engine verifies trees. The cost model takes chains: where the law's noise is known, a
        second candidate brings less than its row costs (benchmarks/results/tuner-ablation.md).
    learned_depth: most tokens that the learned drafter drafts one after the other.
    """
    arms = [Strategy.OFF]
    for kind in kinds:
        if "hybrid" in kinds and kind in ("ahead+learned", "ahead+ngram"):
            continue  # ahead+hybrid takes the better of the two
        depths: tuple[int, ...] = _CHAINS[3:] if kind == "hybrid" else _CHAINS
        if Strategy(kind, 1, 1, 1).uses_references:
            depths = _REFERENCE_DEPTHS
        arms += [Strategy(kind, depth, 1, depth) for depth in depths]
    if "learned" in kinds and trees:
        arms += [Strategy("learned", *shape) for shape in _TREES]
    if "learned" in kinds and learned_depth < Strategy.MAX_DEPTH:
        whole = Strategy("learned", learned_depth, 1, learned_depth)
        arms = [arm for arm in arms if arm.drafter != "learned" or arm.depth < learned_depth]
        arms += [whole]
    return tuple(arm for arm in arms if arm.uses_references or arm.depth <= max_depth)


def check_depth(strategy: Strategy, learned_depth: int) -> None:
    if strategy.depth > learned_depth:
        raise UserError(
            f"speculation: {strategy} drafts {strategy.depth} tokens, and the drafter's block has "
            f"{learned_depth}; give at most that many"
        )


def make_tuner(
    speculation: Speculation,
    kinds: Sequence[str],
    name: str = "cost-model",
    max_depth: int = Strategy.MAX_DEPTH,
    trees: bool = True,
    learned_depth: int = Strategy.MAX_DEPTH,
) -> StrategyTuner | None:
    """None for Off. Raises UserError for a strategy whose drafter does not exist.

    kinds: of the drafters that exist, the preferred first.
    name: of the tuner behind Adaptive, cost-model or beg-mab.
    """
    if isinstance(speculation, Off):
        return None
    if not isinstance(speculation, Adaptive):
        strategy = speculation.drafted_by(kinds[0])
        if strategy.drafter not in kinds:
            raise UserError(
                f"speculation: {str(speculation)!r} needs a drafter of kind {strategy.drafter}; there is "
                f"{', '.join(kinds)}"
            )
        if strategy.drafter == "learned":
            check_depth(strategy, learned_depth)
        return FixedTuner(strategy)
    if name == "beg-mab":
        return BegMab(groups_of(default_arms(kinds, max_depth, trees, learned_depth)))
    assert name == "cost-model", name
    return CostModel(default_arms(kinds, max_depth, False, learned_depth))
