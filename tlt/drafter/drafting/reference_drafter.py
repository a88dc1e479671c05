"""Drafts from references: responses drawn before with the same noise (references.py).

    reference   t0 t1 t2 t3 t4 t5 …     agrees so far: its next tokens are the draft, while likely accepted
    response    t0 t1 t2                differs: the place is found again, by position or by the last tokens
                         └ draft t3 t4 t5 …     without a reference, another drafter drafts (`ahead+…`)

Acceptance is learned for three cases: the reference has always agreed; it is read at the response's own
position, where the noise is the same; or at another. Every new token is compared, so an unlikely case can
recover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout, Verdict
from tlt.base.uploads import upload
from tlt.drafter.drafting.hybrid import choose_rows
from tlt.drafter.drafting.retrieval.continuations import match_bucket
from tlt.drafter.drafting.retrieval.references import Reference, References
from tlt.drafter.drafting.retrieval.suffix_index import ANCHORS, MAX_MATCH, SuffixIndex
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal, WrappingDrafter
from tlt.speculation.law.tree import chain
from tlt.speculation.tuner.protocol import ReferenceDraft

REFERENCE = "ahead"
"""Drafts from references alone; `ahead+KIND`: by KIND where there is no reference."""

_LEAST_CHANCE = 0.4
"""A draft ends where its chance to be accepted whole falls below this."""
_KEEP = 0.9995
"""Factor by which a case's counts fade per token."""
_SUREST = 0.9995
"""The highest rate assumed."""
_UNBROKEN, _IN_PLACE, _OUT_OF_PLACE = range(3)
_PRIORS = ([20.0, 20.5], [1.0, 2.0], [1.0, 2.0])
"""By case: initial counts of agreeing and of compared tokens."""

Cell = tuple[int, int]
"""A case, and the bucket of the number of tokens that agreed before."""


def reference_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    return (*kinds, REFERENCE, *(f"{REFERENCE}+{kind}" for kind in kinds))


class ReferenceCursor:
    """skip: tokens of the prompt."""

    def __init__(self, reference: Reference, skip: int) -> None:
        self.reference, self.version, self.skip = reference.token_ids, reference.version, skip
        self.place = 0
        """Index in the reference of the token expected next."""
        self.num_read = 0
        self.num_agreed = 0
        """Tokens before `place` that agree with the response's last ones, up to MAX_MATCH."""
        self.has_differed = False
        self._index: SuffixIndex | None = None

    @property
    def cell(self) -> Cell:
        if not self.has_differed:
            return _UNBROKEN, 0
        return (_IN_PLACE if self.place == self.num_read else _OUT_OF_PLACE), match_bucket(self.num_agreed)

    @property
    def num_left(self) -> int:
        return len(self.reference) - self.place

    def read(
        self, tokens: Sequence[int], note: Callable[[Cell, bool], None] = lambda cell, agrees: None
    ) -> None:
        """tokens: of the whole sequence, prompt included."""
        for token in tokens[self.skip + self.num_read :]:
            agrees = self.place < len(self.reference) and self.reference[self.place] == token
            if self.place < len(self.reference):
                note(self.cell, agrees)
            self.num_agreed = min(self.num_agreed + 1, MAX_MATCH) if agrees else 0
            self.has_differed |= not agrees
            self.place += 1
            self.num_read += 1
        if self.has_differed and self.num_agreed < ANCHORS[-1]:
            self._find_place(tokens)

    def next_tokens(self, num: int) -> Sequence[int]:
        return self.reference[self.place : self.place + num]

    def _find_place(self, tokens: Sequence[int]) -> None:
        if self._index is None:
            self._index = SuffixIndex()
            self._index.extend(self._index.open(self.skip), [*tokens[: self.skip], *self.reference])
        best = self._agreement(tokens), self.num_read
        for length, _, end in self._index.sources(tokens):
            if length > best[0]:
                best = length, end - self.skip
        self.num_agreed, self.place = best

    def _agreement(self, tokens: Sequence[int]) -> int:
        num = min(self.num_read, MAX_MATCH)
        if self.num_read > len(self.reference):
            return 0
        pairs = (tokens[-1 - i] == self.reference[self.num_read - 1 - i] for i in range(num))
        return next((i for i, agrees in enumerate(pairs) if not agrees), num)


class ReferenceAcceptance:
    def __init__(self) -> None:
        self.hits = [[[*prior] for _ in range(match_bucket(MAX_MATCH) + 1)] for prior in _PRIORS]

    def read(self, cursor: ReferenceCursor, tokens: Sequence[int]) -> None:
        cursor.read(tokens, self._note)

    def possible(self, cursor: ReferenceCursor) -> ReferenceDraft:
        """Returns the longest draft likely accepted whole."""
        case, bucket = cursor.cell
        agreed, compared = self.hits[case][bucket]
        rate = min(agreed / compared, _SUREST)
        num_likely = int(math.log(_LEAST_CHANCE) / math.log(rate))
        return ReferenceDraft(rate, min(num_likely, cursor.num_left))

    def draft(
        self, cursor: ReferenceCursor | None, tokens: Sequence[int], request: Request, depth: int
    ) -> Sequence[int]:
        if cursor is None:
            return ()
        # the target adds a token of its own
        num_left = len(request.prompt_ids) + request.params.max_tokens - len(tokens) - 1
        return cursor.next_tokens(max(min(depth, self.possible(cursor).length, num_left), 0))

    def restore(self, hits: Sequence[Sequence[Sequence[float]]]) -> None:
        self.hits = [[[*pair] for pair in case] for case in hits]

    def _note(self, cell: Cell, agrees: bool) -> None:
        case, bucket = cell
        agreed, compared = self.hits[case][bucket]
        self.hits[case][bucket] = [_KEEP * agreed + agrees, _KEEP * compared + 1]


@dataclass(frozen=True)
class ReferenceProposal(Proposal):
    inner: Any = None
    """None: the other drafter was not asked."""

    def drafter_of(self, row: int, strategy: Strategy) -> str:
        if self.inner is None or (self.references and self.references[row] is not None):
            return REFERENCE
        inner = strategy.without_reference if strategy.uses_references else strategy
        return str(self.inner.drafter_of(row, inner))


class ReferenceDrafter(WrappingDrafter[ReferenceProposal]):
    def __init__(self, inner: Drafter[Any], references: References, max_slots: int) -> None:
        super().__init__(inner)
        self.inner, self.references = inner, references
        self.acceptance = ReferenceAcceptance()
        self.kinds = reference_kinds(inner.kinds)
        self.cursors: list[ReferenceCursor | None] = [None] * max_slots

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        self._read(tokens)
        found = [self.acceptance.possible(cursor) for cursor in self.cursors if cursor is not None]
        return tuple(draft for draft in found if draft.length > 0)

    # ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, slot: int, request: Request) -> None:
        super().admit(slot, request)
        self._point(slot, request)

    def unpark(self, slot: int, request: Request, parked: tuple[Any, ...]) -> None:
        super().unpark(slot, request, parked)
        self._point(slot, request)

    def _point(self, slot: int, request: Request) -> None:
        reference = self.references.get(request.noise_key)
        skip = len(request.prompt_ids)
        self.cursors[slot] = None if reference is None else ReferenceCursor(reference, skip)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.cursors[target], self.cursors[source] = self.cursors[source], None

    def finish(self, slot: int, rollout: Rollout) -> None:
        super().finish(slot, rollout)
        self.cursors[slot] = None

    def withdraw(self, slot: int) -> None:
        super().withdraw(slot)
        self.cursors[slot] = None

    def counters(self) -> dict[str, Any]:
        return {**self.inner.counters(), REFERENCE: self.acceptance.hits}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        self.inner.restore(counters)
        self.acceptance.restore(counters[0][REFERENCE])

    def observe(self, proposal: ReferenceProposal, verdicts: Sequence[Verdict]) -> None:
        if proposal.inner is not None:
            self.inner.observe(proposal.inner, verdicts)

    # ── drafting ────────────────────────────────────────────────────────────────────────────────────────────

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> ReferenceProposal:
        self._read(context.tokens)
        if not strategy.uses_references:
            inner = self.inner.propose(context, strategy, noise, discarded)
            return ReferenceProposal(inner.tree, inner)
        cursors = self.cursors[: len(context.tokens)]
        rows = zip(cursors, context.tokens, context.requests, strict=True)
        drafts = [self.acceptance.draft(*row, strategy.depth) for row in rows]
        longest, pairs = max(map(len, drafts)), zip(context.tokens, drafts, strict=True)
        nodes = [[tokens[-1], *draft, *[0] * (longest - len(draft))] for tokens, draft in pairs]
        tree = chain(upload(nodes, context.device), [1 + len(draft) for draft in drafts])
        used = zip(drafts, cursors, strict=True)
        versions = tuple(cursor.version if draft and cursor else None for draft, cursor in used)
        discarded = [row for row, version in enumerate(versions) if version is not None]
        if strategy.without_reference.is_off or len(discarded) == len(versions):
            return ReferenceProposal(tree, references=versions)
        inner = self.inner.propose(context, strategy.without_reference, noise, discarded)
        tree = choose_rows(tree, inner.tree, [version is not None for version in versions])
        return ReferenceProposal(tree, inner, references=versions)

    def _read(self, texts: Sequence[Sequence[int]]) -> None:
        for cursor, tokens in zip(self.cursors, texts, strict=False):
            if cursor is not None:
                self.acceptance.read(cursor, tokens)
