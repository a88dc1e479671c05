"""Retrieval (`ngram`), the learned drafter (`learned`), and `hybrid`, which takes, row by row, the draft
expected to be accepted further. If retrieval wins every row, the learned drafter does not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Verdict
from tlt.base.uploads import upload
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedProposal
from tlt.drafter.drafting.retrieval.ngram import NgramDrafter, NgramProposal
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal, WrappingDrafter
from tlt.speculation.law.tree import chain


def drafter_kinds(has_learned: bool) -> tuple[str, ...]:
    return HybridDrafter.kinds if has_learned else NgramDrafter.kinds


def make_drafter(learned: LearnedDrafter | None, max_slots: int) -> Drafter[Any]:
    ngram = NgramDrafter(max_slots)
    return ngram if learned is None else HybridDrafter(learned, ngram)


@dataclass(frozen=True)
class HybridProposal(Proposal):
    is_retrieved: tuple[bool, ...]
    """Rows that the learned drafter does not draft."""
    learned: LearnedProposal | None = None
    """None: it was not asked."""
    retrieved: NgramProposal | None = None
    """None: it was not asked."""

    def drafter_of(self, row: int, strategy: Strategy) -> str:
        return "ngram" if self.is_retrieved[row] else "learned"


class HybridDrafter(WrappingDrafter[HybridProposal]):
    kinds = ("learned", "ngram", "hybrid")

    def __init__(self, learned: LearnedDrafter, ngram: NgramDrafter) -> None:
        super().__init__(learned, ngram)
        self._learned, self.ngram = learned, ngram
        self.learned_accepted = 1.0  # running mean of accepted tokens per learned draft

    @property
    def learned(self) -> LearnedDrafter:
        return self._learned

    def observe(self, proposal: HybridProposal, verdicts: Sequence[Verdict]) -> None:
        if proposal.retrieved is not None:
            self.ngram.observe(proposal.retrieved, verdicts)
        if proposal.learned is not None:
            self.learned.observe(proposal.learned, verdicts)
            rows = zip(verdicts, proposal.is_retrieved, strict=True)
            accepted = [verdict.num_accepted for verdict, is_retrieved in rows if not is_retrieved]
            keep, num = 0.99 ** len(accepted), max(len(accepted), 1)
            self.learned_accepted = keep * self.learned_accepted + (1 - keep) * sum(accepted) / num

    def counters(self) -> dict[str, Any]:
        known = {"learned": self.learned.counters(), "ngram": self.ngram.counters()}
        return {**known, "learned_accepted": self.learned_accepted}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        self.learned.restore([known["learned"] for known in counters])
        self.ngram.restore([known["ngram"] for known in counters])
        self.learned_accepted = counters[0]["learned_accepted"]

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> HybridProposal:
        num_rows, skipped = len(context.tokens), set(discarded)
        match strategy.drafter:
            case "learned":
                learned = self.learned.propose(context, strategy, noise, discarded)
                is_retrieved = tuple(row in skipped for row in range(num_rows))
                return HybridProposal(learned.tree, is_retrieved, learned)
            case "ngram":
                retrieved = self.ngram.propose(context, strategy, noise)
                return HybridProposal(retrieved.tree, (True,) * num_rows, retrieved=retrieved)
        retrieved = self.ngram.propose(context, strategy, noise)
        expected = [sum(self.ngram.survival(row, strategy.depth)) for row in retrieved.retrieved]
        is_retrieved = tuple(
            row in skipped or tokens > self.learned_accepted for row, tokens in enumerate(expected)
        )
        if all(is_retrieved):
            return HybridProposal(retrieved.tree, is_retrieved, retrieved=retrieved)
        retrieved_rows = [row for row in range(num_rows) if is_retrieved[row]]
        learned = self.learned.propose(context, strategy, noise, retrieved_rows)
        tree = choose_rows(retrieved.tree, learned.tree, is_retrieved) if retrieved_rows else learned.tree
        return HybridProposal(tree, is_retrieved, learned, retrieved)


def choose_rows(a: DraftTree, b: DraftTree, is_a: Sequence[bool]) -> DraftTree:
    """Returns tree a where `is_a`, else tree b, padded to the wider."""
    num_nodes = max(a.num_nodes, b.num_nodes)
    is_a_B = upload(is_a, a.tokens_BN.device)
    chosen = []
    for left, right, filling in ((a.tokens_BN, b.tokens_BN, 0), (a.parents_BN, b.parents_BN, -1)):
        left, right = (F.pad(x, (0, num_nodes - x.shape[1]), value=filling) for x in (left, right))
        chosen.append(torch.where(is_a_B[:, None], left, right))
    rows = zip(is_a, a.row_lengths, b.row_lengths, strict=True)
    lengths = [left if is_left else right for is_left, left, right in rows]
    if a.is_chain and b.is_chain:
        return chain(chosen[0], lengths)
    return DraftTree(chosen[0], chosen[1], lengths=tuple(lengths))
