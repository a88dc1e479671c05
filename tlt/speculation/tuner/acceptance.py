"""Predicts tokens per verification from how many drafted tokens were accepted so far.

The rate at depth d ≥ 1 is P(token accepted | all before it accepted), at index `level` = d - 1 of a list.
Products of rates are the survival curve. A verification is expected to commit the sum of the curve plus one,
the bonus token.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.expectation import Array, ChainTable, Expectation, Rates
from tlt.speculation.tuner.protocol import ReferenceDraft, ShadowDraft, StepOutcome

# Constants, in verifications unless engine steps are named. A date names the entry of benchmarks/log.md that
# compares values; "-": none were compared.
#
#                              meaning                                                      chosen by
_RATE = 0.7  #                 rate assumed of a drafter at depth 1, before any evidence    -
_RATE_OF_RETRIEVAL = 0.03  #   the same of retrieval: few texts repeat                      2026-11-21
_WORTH_OF_RATE = 1.0  #        weight of an assumed rate                                    -
_WORTH_OF_RESEMBLED = 4.0  #   weight that the learned drafter's evidence adds to hybrid's  -
_WORTH_ELSEWHERE = 16.0  #     most weight of evidence from other batch sizes               2026-11-21
_WORTH_OF_OLDER = 16.0  #      most weight of evidence about an older policy or drafter     see 2026-11-25
_ENOUGH = 3.0  #               evidence after which a drafter's chains are known            -
_MAX_LEANING = 0.8  #          highest rate that a depth takes over from the one before     see 2026-11-24
_MUCH = 8.0  #                 evidence at depth 1 that halves the doubt about such a rate  -
_MEMORY = 100.0  #             span of an octave's curve; retrieval's, in engine steps      2026-11-21, 24
_MIN_STEPS = 6.0  #            its fewest engine steps: texts of a batch change together    2026-11-24
_MEMORY_EVERYWHERE = 400.0  #  span of the curve over all batch sizes                       2026-11-24
_UNWATCHED = 4.0  #            factor by which retrieval's fades faster while hybrid runs   2026-11-24


class Curve(NamedTuple):
    """Key of a survival curve. Chains of any depth share a curve."""

    drafter: str
    width: int
    budget: int | None
    """Budget of trees; None: chains."""
    octave: int | None
    """log2 of the batch size, rounded; None: all batch sizes."""
    where_drafted: bool = False
    """True: leave out depths that retrieval could not fill; False: they count as rejected."""

    @staticmethod
    def of(strategy: Strategy, octave: int | None) -> Curve:
        budget = None if strategy.width == 1 else strategy.budget
        return Curve(strategy.drafter, strategy.width, budget, octave)


@dataclass
class _Counts:
    """Verifications by depth: reached (`tried`), and accepted there (`survived`)."""

    tried: Array = field(default_factory=lambda: np.zeros(Strategy.MAX_DEPTH))
    survived: Array = field(default_factory=lambda: np.zeros(Strategy.MAX_DEPTH))

    def add(self, tried_D: Array, survived_D: Array, fade: float) -> None:
        self.scale(fade)
        self.tried[: len(tried_D)] += tried_D
        self.survived[: len(survived_D)] += survived_D

    def scale(self, factor: float) -> None:
        self.tried *= factor
        self.survived *= factor


class AcceptanceModel:
    """Estimates acceptance rates from a strategy's own verifications and those of similar strategies.

    Each octave of batch sizes has its own curve, because texts in the tail differ; other sizes add evidence
    of bounded weight. A seldom reached depth takes its rate from the depth before.

    The first rates are constants. A drafter's folder records acceptance at depth 1 alone: assumed of all
    depths, it kept long chains from being tried (benchmarks/log.md, 2026-11-26).
    """

    def __init__(self) -> None:
        self.counts: dict[Curve, _Counts] = defaultdict(_Counts)
        self.drafts: dict[str, _Counts] = defaultdict(_Counts)
        """By drafter and depth: chains that might have drafted a token (`tried`), and did (`survived`)."""
        self._drafted: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
        """Expected nodes and levels of chains of depth 1, 2, …"""
        self._rates: dict[Curve, Rates] = {}
        self._tables: dict[Curve, ChainTable] = {}

    def observe(
        self,
        strategy: Strategy,
        accepted: Sequence[int],
        drafted: Sequence[int] = (),
        batch_size: int | None = None,
    ) -> None:
        """Counts one verification per sequence.

        drafted: levels, fewer than the strategy's depth where retrieval found less; (): all.
        batch_size: of the whole batch, if these sequences are only a part.
        """
        self._forget_estimates(strategy.drafter)
        depth = strategy.depth
        accepted_B = np.minimum(np.asarray(accepted), depth)
        came_BD = accepted_B[:, None] >= np.arange(depth + 1)
        was_drafted_BD = np.asarray(drafted or [depth] * len(accepted))[:, None] > np.arange(depth)
        tried_D, survived_D = came_BD[:, :-1].sum(0), came_BD[:, 1:].sum(0)
        drafted_D = (came_BD[:, :-1] & was_drafted_BD).sum(0)
        batch_size = batch_size or len(accepted)
        octave, share = octave_of(batch_size), len(accepted) / batch_size
        num_steps = _MEMORY if strategy.drafter == "ngram" else max(_MEMORY / batch_size, _MIN_STEPS)
        here = math.exp(-share / num_steps)
        for where, fade in ((None, math.exp(-len(accepted) / _MEMORY_EVERYWHERE)), (octave, here)):
            curve = Curve.of(strategy, where)
            self.counts[curve].add(tried_D, survived_D, fade)
            if strategy.width == 1:
                self.counts[curve._replace(where_drafted=True)].add(drafted_D, survived_D, fade)
        if strategy.drafter == "hybrid":  # retrieval alone is not judged meanwhile
            for curve, retrieved in self.counts.items():
                if curve.drafter == "ngram":
                    retrieved.scale(here**_UNWATCHED)
            self._forget_estimates("ngram")
        if strategy.width == 1:
            num_drafts_D = np.full(depth, float(len(accepted)))
            self.drafts[strategy.drafter].add(num_drafts_D, was_drafted_BD.sum(0), here)

    def _forget_estimates(self, drafter: str | None = None) -> None:
        self._drafted.clear()
        for known in (self._rates, self._tables):
            for curve in [c for c in known if drafter is None or c.drafter in (drafter, "hybrid")]:
                del known[curve]

    def observe_without_reference(self, strategy: Strategy, outcome: StepOutcome) -> None:
        """Counts sequences without a reference; `ReferenceDraft` predicts the others."""
        rows = [row for row, uses_one in enumerate(outcome.from_reference) if not uses_one]
        if rows and not strategy.without_reference.is_off:
            accepted, drafted = ([nums[row] for row in rows] for nums in (outcome.accepted, outcome.drafted))
            self.observe(strategy.without_reference, accepted, drafted, len(outcome.from_reference))

    def observe_shadow_drafts(self, chains: Sequence[ShadowDraft], batch_size: int) -> None:
        if chains:
            accepted, drafted = [one.accepted for one in chains], [one.drafted for one in chains]
            self.observe(ShadowDraft.STRATEGY, accepted, drafted, batch_size)

    def age(self) -> None:
        """Bounds the evidence, which is of an older policy or drafter."""
        self._forget_estimates()
        for counts in self.counts.values():
            counts.scale(_WORTH_OF_OLDER / max(counts.tried[0], _WORTH_OF_OLDER))

    def rates(self, curve: Curve) -> Rates:
        rates = self._rates.get(curve)
        if rates is None:
            rates = self._rates[curve] = self._estimate(curve)
        return rates

    def is_known(self, arm: Strategy) -> bool:
        counts = self.counts.get(Curve(arm.drafter, 1, None, None))
        return counts is not None and bool(counts.tried[0] >= _ENOUGH)

    def drafted(
        self, arm: Strategy, batch_size: int, references: Sequence[ReferenceDraft] = ()
    ) -> tuple[float, float]:
        """Returns (expected nodes per sequence, expected levels). The longest chain decides the levels.
        Retrieval may find less than the arm's depth; a reference draft's length is known."""
        if arm.uses_references:
            nodes, levels = self.drafted(arm.without_reference, batch_size)
            copied = sum(min(arm.depth, one.length) for one in references)
            return (copied + (batch_size - len(references)) * nodes) / batch_size, levels
        if arm.width > 1 or arm.is_off or arm.drafter not in self.drafts:
            return float(arm.budget), float(arm.depth)
        sums = self._drafted.get((arm.drafter, batch_size))
        if sums is None:
            counts = self.drafts[arm.drafter]
            share_D = (counts.survived + 1) / (counts.tried + 1)
            longest_D = 1 - (1 - share_D) ** batch_size
            sums = np.cumsum(share_D).tolist(), np.cumsum(longest_D).tolist()
            self._drafted[arm.drafter, batch_size] = sums
        return sums[0][arm.depth - 1], sums[1][arm.depth - 1]

    def tokens(self, arm: Strategy, batch_size: int) -> float:
        """Returns tokens per verification of an arm without references, the bonus token included."""
        return float(self._table(Curve.of(arm, octave_of(batch_size))).tokens_D[arm.depth - 1])

    def survivals(self, arm: Strategy, batch_size: int) -> Array:
        """Returns survival by depth of an arm without references."""
        table = self._table(Curve.of(arm, octave_of(batch_size)))
        return np.append(table.survivals_D[1:], table.tokens_D[-1] - table.tokens_D[-2])

    def expected(
        self, arms: Sequence[Strategy], batch_size: int, references: Sequence[ReferenceDraft] = ()
    ) -> Expectation:
        """Includes the bonus token. references: one for each sequence that has a reference."""
        octave = octave_of(batch_size)
        drafting = [arm.without_reference for arm in arms]
        curves = [Curve.of(arm, octave) for arm in drafting]
        columns = {curve: column for column, curve in enumerate(dict.fromkeys(curves))}
        tables = [self._table(curve) for curve in columns]
        tokens_A, spread_ACD = np.ones(len(arms)), np.zeros((len(arms), len(columns), Strategy.MAX_DEPTH))
        for i, arm in enumerate(drafting):
            if not arm.is_off:
                column, row = columns[curves[i]], arm.depth - 1
                tokens_A[i] = tables[column].tokens_D[row]
                spread_ACD[i, column] = tables[column].spread_DD[row]
            if arms[i].uses_references:
                share = 1 - len(references) / batch_size
                kept = sum(one.expected(arms[i].depth) for one in references) / batch_size
                alone, tokens_A[i] = tokens_A[i], 1 + kept + share * (tokens_A[i] - 1)
                spread_ACD[i] *= share * alone / tokens_A[i]
        counts_R = np.concatenate([table.counts_D for table in tables])
        survivals_R = np.concatenate([table.survivals_D for table in tables])
        return Expectation(tokens_A, spread_ACD.reshape(len(arms), -1), counts_R, survivals_R)

    def _table(self, curve: Curve) -> ChainTable:
        table = self._tables.get(curve)
        if table is None:
            table = self._tables[curve] = ChainTable.of(self.rates(curve))
        return table

    def counters(self) -> dict[str, list[Any]]:
        return {
            name: [[key, c.tried.tolist(), c.survived.tolist()] for key, c in known.items()]
            for name, known in self._kinds().items()
        }

    def restore(self, counters: Mapping[str, Sequence[Any]]) -> None:
        self._forget_estimates()
        for name, known in self._kinds().items():
            known.clear()
            for key, tried, survived in counters[name]:
                known[key if name == "drafts" else Curve(*key)] = _Counts(np.array(tried), np.array(survived))

    def _kinds(self) -> dict[str, dict[Any, _Counts]]:
        return {"latest": self.counts, "drafts": self.drafts}

    def _prior(self, curve: Curve) -> Sequence[float]:
        """Returns a similar curve's rates, assumed without evidence; (): none is similar. Retrieval resembles
        the hybrid, if that was tried; the hybrid, a mixture; a tree, its drafter's chains."""
        if curve.drafter == "hybrid":
            resembled = (("learned", False), ("ngram", False), ("ngram", True))
            return _mixture(
                *(self.rates(Curve(kind, 1, None, curve.octave, where)).accepted for kind, where in resembled)
            )
        hybrid = self.counts.get(Curve("hybrid", 1, None, curve.octave), _NOTHING)
        if curve.drafter == "ngram" and hybrid.tried[0] >= _MUCH:
            rates: list[float] = ((hybrid.survived + 0.5) / (hybrid.tried + 1.0)).tolist()
            return rates
        if curve.width == 1:
            return ()
        return self.rates(Curve(curve.drafter, 1, None, curve.octave, where_drafted=True)).accepted

    def _estimate(self, curve: Curve) -> Rates:
        """Posterior means: a prior by depth is updated at all batch sizes, then at the octave."""
        prior = self._prior(curve)
        here = self.counts.get(curve, _NOTHING)
        everywhere = self.counts.get(curve._replace(octave=None), _NOTHING)
        tried, survived = here.tried.tolist(), here.survived.tolist()
        all_tried, all_survived = everywhere.tried.tolist(), everywhere.survived.tolist()
        first = _RATE_OF_RETRIEVAL if curve.drafter == "ngram" else _RATE
        known = _WORTH_OF_RATE
        if curve.drafter == "hybrid":  # its prior rests on evidence about the learned drafter
            learned = self.counts.get(Curve("learned", 1, None, None), _NOTHING)
            known += min(float(learned.tried[0]), _WORTH_OF_RESEMBLED)
        rate, num_chances = first, math.sqrt(curve.width)  # later candidates are worth less
        doubt = _MUCH / (_MUCH + max(all_tried[0], tried[0]))
        accepted, counts, survival = [], [], 1.0
        for level in range(Strategy.MAX_DEPTH):
            if prior:
                rate = 1.0 - (1.0 - prior[level]) ** num_chances
            elif rate > _MAX_LEANING:
                rate -= doubt * (rate - _MAX_LEANING)
            num, kept = tried[level], survived[level]
            others, others_kept = all_tried[level] - num, all_survived[level] - kept
            if others > 0.0:  # conditions instead of min and max, which would take most of a decision's time
                others_kept = 0.0 if others_kept < 0.0 else others if others_kept > others else others_kept
                worth = others + known
                rate = (others_kept + known * rate) / worth
            else:
                worth = known
            limit = _WORTH_ELSEWHERE * survival
            limit = known if limit < known else limit
            worth = limit if worth > limit else worth
            rate = (kept + worth * rate) / (num + worth)
            survival *= rate
            accepted.append(rate)
            counts.append(num + worth)
        return Rates(accepted, counts)


_NOTHING = _Counts()


def _mixture(
    learned: Sequence[float], retrieved: Sequence[float], where_retrieved: Sequence[float]
) -> Sequence[float]:
    """Retrieval where it finds something, else the learned drafter; at depths that the latter survives more
    often, its own rates."""
    nothing = 1 - min(retrieved[0] / where_retrieved[0], 1.0)
    survivals = zip(accumulate(learned, operator.mul), accumulate(retrieved, operator.mul), strict=True)
    mixed = [max(alone, found + nothing * alone) for alone, found in survivals]
    return [there / here for here, there in pairwise([1.0, *mixed])]


def octave_of(batch_size: int) -> int:
    return round(math.log2(batch_size))
