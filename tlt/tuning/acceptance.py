"""Tokens per verification, predicted from how many drafted tokens were accepted so far. It knows no seconds.

Depth by depth, the target accepts a drafted token with some probability, given that it has accepted all before it. Their
products are the survival curve; its sum, and one for the bonus token, is what a verification is expected to commit.
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
from numpy.typing import NDArray

from tlt.types import Hindsight, Lead, Strategy

Array = NDArray[np.float64]

_PRIOR_RATE = 0.7
"""The acceptance rate that is assumed at depth 1 before anything was verified."""
_PRIOR_COUNT = 1.5
"""The verifications that this assumption counts as, and at deeper levels the rate of the level before."""
_MEMORY = 100.0
"""Engine steps that a curve of one octave spans. A text changes its character, and in the tail few texts are left."""
_MEMORY_EVERYWHERE = 4000.0
"""Verifications that the curve over all batch sizes spans."""
_MEMORY_OF_RUN = 4000.0
"""Engine steps that a lasting curve spans, at its batch sizes."""
_WORTH_ELSEWHERE = 16.0
"""Verifications that the evidence of all batch sizes counts as, at most, at any one of them."""
_WORTH_AT_NEW_VERSION = 16.0
"""Verifications that the evidence about an older policy or drafter counts as, at most. This is enough to start from, and so
little that a drafter which has become better, or worse, is soon found out."""


class Curve(NamedTuple):
    """Names the verifications that are counted together, in one survival curve.

    width, budget: the shape of a draft tree. Chains of any depth share a curve: width 1, and no budget (None).
    octave: log2 of the batch size, rounded. None: all batch sizes.
    where_drafted: leaves out the depths that a chain never drafted because it stopped for itself. Otherwise such a depth
        counts as one that was not accepted.
    """

    drafter: str
    width: int
    budget: int | None
    octave: int | None
    where_drafted: bool = False

    @staticmethod
    def of(strategy: Strategy, octave: int | None) -> Curve:
        return Curve(strategy.drafter, strategy.width, None if strategy.width == 1 else strategy.budget, octave)

    @property
    def everywhere(self) -> Curve:
        """Returns the same curve over all batch sizes."""
        return Curve(self.drafter, self.width, self.budget, None, self.where_drafted)


@dataclass(frozen=True)
class Rates:
    """For d = 0, 1, …: the probability that the target accepts the token at depth d + 1, given that it has accepted all
    before it, and the number of verifications behind this estimate."""

    accepted: Sequence[float]
    counts: Sequence[float]


def _zeros() -> Array:
    return np.zeros(Strategy.MAX_DEPTH)


@dataclass
class _Counts:
    """Verifications that came to each depth (`tried`), and of those the ones that went on from there (`survived`)."""

    tried: Array = field(default_factory=_zeros)
    survived: Array = field(default_factory=_zeros)

    def add(self, tried_D: Array, survived_D: Array, fade: float) -> None:
        self.scale(fade)
        self.tried[: len(tried_D)] += tried_D
        self.survived[: len(survived_D)] += survived_D

    def scale(self, factor: float) -> None:
        self.tried *= factor
        self.survived *= factor


class Acceptance:
    """Estimates the acceptance rates of every strategy, each from its own verifications and from those it resembles.

    The texts that are left in the tail are not those of the beginning. So each octave of batch sizes has a curve of its own,
    to which the evidence from all batch sizes is lent with a bounded weight. A depth that was seldom reached leans on the
    depth before it.
    """

    def __init__(self) -> None:
        self.counts: dict[Curve, _Counts] = defaultdict(_Counts)
        self.lasting: dict[Curve, _Counts] = defaultdict(_Counts)
        """The same, but slow to fade and whatever the version: what a run was like on the whole. Nothing is decided by it."""
        self._rates: dict[Curve, Rates] = {}

    def observe(
        self, strategy: Strategy, accepted: Sequence[int], drafted: Sequence[int] = (), batch_size: int | None = None
    ) -> None:
        """Counts one verification per sequence, of a batch of `batch_size`; None: of as many.

        accepted: drafted tokens that the target accepted.  drafted: levels that were drafted, fewer than the strategy's depth
        where a chain stopped for itself. Empty: all of them everywhere.
        """
        self._rates.clear()
        depth = strategy.depth
        accepted_B = np.minimum(np.asarray(accepted), depth)
        came_BD = accepted_B[:, None] >= np.arange(depth + 1)
        tried_D, survived_D = came_BD[:, :-1].sum(0), came_BD[:, 1:].sum(0)
        was_drafted_BD = np.asarray(drafted or [depth] * len(accepted))[:, None] > np.arange(depth)
        drafted_D = (came_BD[:, :-1] & was_drafted_BD).sum(0)
        batch_size = batch_size or len(accepted)
        octave, share = octave_of(batch_size), len(accepted) / batch_size
        here, whole_run = math.exp(-share / _MEMORY), math.exp(-share / _MEMORY_OF_RUN)
        spans = ((self.counts, None, math.exp(-len(accepted) / _MEMORY_EVERYWHERE)), (self.counts, octave, here))
        for counts, where, fade in (*spans, (self.lasting, None, whole_run), (self.lasting, octave, whole_run)):
            counts[Curve.of(strategy, where)].add(tried_D, survived_D, fade)
            if strategy.width == 1:
                curve = Curve(strategy.drafter, 1, None, where, where_drafted=True)
                counts[curve].add(drafted_D, survived_D, fade)

    def observe_elsewhere(
        self, strategy: Strategy, accepted: Sequence[int], drafted: Sequence[int], followed: Sequence[bool]
    ) -> None:
        """Counts the sequences alone that had no reference to follow; of the others the drafter knows more (`Lead`)."""
        rows = [row for row, is_followed in enumerate(followed) if not is_followed]
        if rows and not strategy.elsewhere.is_off:
            self.observe(strategy.elsewhere, [accepted[i] for i in rows], [drafted[i] for i in rows], len(followed))

    def observe_in_hindsight(self, chains: Sequence[Hindsight], batch_size: int) -> None:
        """Counts what retrieval would have had of a sequence for which another drafter drafted, or none."""
        if chains:
            self.observe(Hindsight.STRATEGY, [c.accepted for c in chains], [c.drafted for c in chains], batch_size)

    def age(self, worth: float = _WORTH_AT_NEW_VERSION) -> None:
        """Lets each curve's evidence count as `worth` verifications at most."""
        self._rates.clear()
        for counts in self.counts.values():
            counts.scale(min(worth / max(counts.tried[0], worth), 1.0))

    def rates(self, curve: Curve) -> Rates:
        rates = self._rates.get(curve)
        if rates is None:
            rates = self._rates[curve] = self._estimate(curve)
        return rates

    def expected_tokens(self, arms: Sequence[Strategy], batch_size: int, leads: Sequence[Lead] = ()) -> tuple[Array, Array]:
        """Returns tokens per verification, the bonus token included, and the variance of their logarithms: each [arms].

        leads: of the sequences that have a reference to follow.
        """
        octave = octave_of(batch_size)
        tokens_A, variance_A = np.ones(len(arms)), np.zeros(len(arms))
        for i, arm in enumerate(arms):
            if arm.follows:
                share, kept = 1 - len(leads) / batch_size, sum(lead.expected(arm.depth) for lead in leads) / batch_size
                tokens_1, variance_1 = self.expected_tokens([arm.elsewhere], batch_size)
                tokens_A[i] += kept + share * (tokens_1[0] - 1)
                variance_A[i] = variance_1[0] * (share * tokens_1[0] / tokens_A[i]) ** 2
                continue
            rates = self.rates(Curve.of(arm, octave))
            survivals = list(accumulate(rates.accepted[: arm.depth], operator.mul))
            tokens_A[i] += sum(survivals)
            beyond, variance = 0.0, 0.0
            for d in reversed(range(arm.depth)):
                beyond += survivals[d]  # the tokens that are lost if depth d is not survived
                rate, count = rates.accepted[d], rates.counts[d]
                variance += beyond**2 * (1.001 - rate) / ((rate + 0.001) * count)
            variance_A[i] = variance / tokens_A[i] ** 2
        return tokens_A, variance_A

    def counters(self) -> dict[str, list[Any]]:
        """Returns (curve, verifications tried, survived) of every curve, the latest and the lasting ones, as JSON."""
        kinds = {"latest": self.counts, "lasting": self.lasting}
        return {
            name: [[list(curve), c.tried.tolist(), c.survived.tolist()] for curve, c in kind.items()]
            for name, kind in kinds.items()
        }

    def restore(self, counters: Mapping[str, Sequence[Any]]) -> None:
        """Takes up what `counters` returned."""
        self._rates.clear()
        for counts, known in ((self.counts, counters["latest"]), (self.lasting, counters["lasting"])):
            counts.clear()
            counts.update((Curve(*curve), _Counts(np.array(tried), np.array(survived))) for curve, tried, survived in known)

    def forget_the_latest(self) -> None:
        """Estimates from what lasts alone, for whoever asks what a whole run was like."""
        self._rates.clear()
        self.counts = self.lasting

    def _prior(self, curve: Curve) -> Sequence[float]:
        """Returns the rates that are assumed for a curve before it has evidence, by the curves that it resembles. (): by none.

        The hybrid resembles retrieval, and the learned drafter where nothing is retrieved. A tree, which never stops, resembles
        the chains of its drafter at the depths that they drafted.
        """
        if curve.drafter == "hybrid":
            resembled = (("learned", False), ("ngram", False), ("ngram", True))
            return _mixture(*(self.rates(Curve(kind, 1, None, curve.octave, where)).accepted for kind, where in resembled))
        is_chain = curve.width == 1
        return () if is_chain else self.rates(Curve(curve.drafter, 1, None, curve.octave, where_drafted=True)).accepted

    def _estimate(self, curve: Curve) -> Rates:
        """Returns posterior means under a chain of priors: at all batch sizes, then at the curve's own octave."""
        prior = self._prior(curve)
        here, everywhere = self.counts.get(curve, _NOTHING), self.counts.get(curve.everywhere, _NOTHING)
        tried, survived = here.tried.tolist(), here.survived.tolist()
        all_tried, all_survived = everywhere.tried.tolist(), everywhere.survived.tolist()
        rate, num_chances = _PRIOR_RATE, math.sqrt(curve.width)  # further candidates are worth less than the first (DESIGN §2)
        accepted, counts = [], []
        for d in range(Strategy.MAX_DEPTH):
            if prior:
                rate = 1.0 - (1.0 - prior[d]) ** num_chances
            worth = all_tried[d] + _PRIOR_COUNT
            rate = (all_survived[d] + _PRIOR_COUNT * rate) / worth
            worth = min(worth, _WORTH_ELSEWHERE)
            rate = (survived[d] + worth * rate) / (tried[d] + worth)
            accepted.append(rate)
            counts.append(tried[d] + worth)
        return Rates(accepted, counts)


_NOTHING = _Counts()


def _mixture(learned: Sequence[float], retrieved: Sequence[float], where_retrieved: Sequence[float]) -> Sequence[float]:
    """Returns the rates of a drafter that retrieves where there is something to retrieve, and elsewhere drafts as the learned
    one does; at depths where the learned one alone survives more often, those of that one."""
    nothing = 1 - min(retrieved[0] / where_retrieved[0], 1.0)
    survivals = zip(accumulate(learned, operator.mul), accumulate(retrieved, operator.mul), strict=True)
    mixed = [max(alone, found + nothing * alone) for alone, found in survivals]
    return [there / here for here, there in pairwise([1.0, *mixed])]


def octave_of(batch_size: int) -> int:
    return round(math.log2(batch_size))
