"""Drafts from references: responses that were drawn before with the same noise (references.py).

    reference   t0 t1 t2 t3 t4 t5 …     agrees so far: the next tokens are the draft, while likely kept
    response    t0 t1 t2                differs: the place is found again, by position or earlier tokens
                         └ draft t3 t4 t5 …     without a reference, another drafter drafts (`ahead+…`)

The chance that a reference's next token is kept is learned for three cases: the reference has agreed from
the first token on; it has differed, and is read at the response's own position, where the noise is its own;
it has differed, and is read at another position. Every token that a response grows by is compared with its
reference's, drafted or not, so a case that is not drafted from now can become one that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.drafter.drafting.calibration import DEFAULT_CONFIDENCE_THRESHOLD
from tlt.drafter.drafting.continuations import match_bucket
from tlt.drafter.drafting.hybrid import choose_rows
from tlt.drafter.drafting.references import Reference, References
from tlt.drafter.drafting.suffix_index import ANCHORS, MAX_MATCH, SuffixIndex
from tlt.speculative.protocol import DraftContext, Drafter, DraftNoise, Proposal, WrappingDrafter
from tlt.speculative.strategy import ReferenceDraft, Strategy
from tlt.speculative.tree import chain
from tlt.types import Request, Rollout, UserError, Verdict
from tlt.uploads import upload

REFERENCE = "ahead"
"""The kind that drafts from references alone; `ahead+KIND` lets another drafter draft where there is none."""

_KEEP = 0.9995
"""The share of what was learned about a case that outlives one more token."""
_SUREST = 0.9995
"""The highest share of kept tokens that is reckoned with."""
_UNBROKEN, _IN_PLACE, _OUT_OF_PLACE = range(3)
_PRIORS = ([20.0, 20.5], [1.0, 2.0], [1.0, 2.0])
"""Per case: tokens that agreed, tokens compared, before any was."""

Cell = tuple[int, int]
"""A case, and the bucket of how many tokens agreed before."""


def reference_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the kinds of drafter that there are once references are added to these."""
    return (*kinds, REFERENCE, *(f"{REFERENCE}+{kind}" for kind in kinds))


def reference_draft(rate: float, confidence_threshold: float, num_left: int) -> ReferenceDraft:
    """Returns the draft that a reference with `num_left` tokens left allows: all of it is likely kept.

    rate: the chance that a token is kept if all before it are.
    """
    rate = min(rate, _SUREST)
    return ReferenceDraft(rate, min(int(math.log(confidence_threshold) / math.log(rate)), num_left))


class ReferenceCursor:
    """Holds the place in a reference that its growing sequence has reached. skip: tokens of the prompt."""

    def __init__(self, reference: Reference, skip: int) -> None:
        self.reference, self.version, self.skip = reference.token_ids, reference.version, skip
        self.place = 0
        """Index of the reference's token that is expected next."""
        self.num_read = 0
        self.num_agreed = 0
        """Tokens before `place` that agree with the sequence's last ones, up to MAX_MATCH."""
        self.has_differed = False
        self._index: SuffixIndex | None = None

    @property
    def cell(self) -> Cell:
        if not self.has_differed:
            return _UNBROKEN, 0
        return (_IN_PLACE if self.place == self.num_read else _OUT_OF_PLACE), match_bucket(self.num_agreed)

    def read(
        self, tokens: Sequence[int], note: Callable[[Cell, bool], None] = lambda cell, agrees: None
    ) -> None:
        """Reads what the sequence, prompt included, has grown by. note: is told of each token whether the
        reference said it."""
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
        """Returns the reference's next tokens, `num` at most."""
        return self.reference[self.place : self.place + num]

    def _find_place(self, tokens: Sequence[int]) -> None:
        """Goes where most of the last tokens agree; of equals, to the sequence's own position."""
        if self._index is None:
            self._index = SuffixIndex()
            self._index.extend(self._index.open(self.skip), [*tokens[: self.skip], *self.reference])
        best = self._agreement(tokens), self.num_read
        for length, _, end in self._index.sources(tokens):
            if length > best[0]:
                best = length, end - self.skip
        self.num_agreed, self.place = best

    def _agreement(self, tokens: Sequence[int]) -> int:
        """Returns how many of the last tokens agree at the sequence's own position."""
        num = min(self.num_read, MAX_MATCH)
        if self.num_read > len(self.reference):
            return 0
        pairs = (tokens[-1 - i] == self.reference[self.num_read - 1 - i] for i in range(num))
        return next((i for i, agrees in enumerate(pairs) if not agrees), num)


class ReferenceAcceptance:
    """Counts how many tokens of references were right in each case, and drafts as many as are likely kept.

    confidence_threshold: a chain ends where the chance that all of it is kept falls below this.
    """

    def __init__(self, confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD) -> None:
        self.confidence_threshold = confidence_threshold
        self.hits = [[[*prior] for _ in range(match_bucket(MAX_MATCH) + 1)] for prior in _PRIORS]

    def read(self, cursor: ReferenceCursor, tokens: Sequence[int]) -> None:
        """Lets a reference be compared with what was committed since it last was."""
        cursor.read(tokens, self._note)

    def possible(self, cursor: ReferenceCursor) -> ReferenceDraft:
        """Returns the draft that a reference allows now."""
        case, bucket = cursor.cell
        agreed, compared = self.hits[case][bucket]
        return reference_draft(
            agreed / compared, self.confidence_threshold, len(cursor.reference) - cursor.place
        )

    def draft(
        self,
        cursor: ReferenceCursor | None,
        tokens: Sequence[int],
        request: Request,
        depth: int,
        vocab_size: int,
    ) -> Sequence[int]:
        """Returns the draft of one sequence: no longer than it may grow, and no longer than it is likely
        to be kept. Raises UserError for a reference of another vocabulary."""
        if cursor is None:
            return ()
        num_left = (
            len(request.prompt_ids) + request.params.max_tokens - len(tokens) - 1
        )  # the target adds one of its own
        drafted = cursor.next_tokens(max(min(depth, self.possible(cursor).length, num_left), 0))
        if (bad := next((token for token in drafted if not 0 <= token < vocab_size), None)) is not None:
            place = f"reference for problem {request.problem_id!r}, sample {request.sample_index}"
            raise UserError(
                f"{place}: token id {bad} is outside the vocabulary of {vocab_size}; keep responses of this "
                "model"
            )
        return drafted

    def restore(self, hits: Sequence[Sequence[Sequence[float]]]) -> None:
        """Takes up the `hits` of a run that goes on."""
        self.hits = [[[*pair] for pair in case] for case in hits]

    def _note(self, cell: Cell, agrees: bool) -> None:
        case, bucket = cell
        agreed, compared = self.hits[case][bucket]
        self.hits[case][bucket] = [_KEEP * agreed + agrees, _KEEP * compared + 1]


@dataclass(frozen=True)
class ReferenceProposal(Proposal):
    """inner: what the other drafter proposed; None: it was not asked."""

    inner: Any = None


class ReferenceDrafter(WrappingDrafter[ReferenceProposal]):
    """Drafts from references, and with another drafter (`inner`) where there is none.

    confidence_threshold: as of `ReferenceAcceptance`.
    """

    def __init__(
        self,
        inner: Drafter[Any],
        references: References,
        max_slots: int,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    ) -> None:
        super().__init__(inner)
        self.inner, self.references = inner, references
        self.acceptance = ReferenceAcceptance(confidence_threshold)
        self.kinds = reference_kinds(inner.kinds)
        self.cursors: list[ReferenceCursor | None] = [None] * max_slots

    def reference_drafts(self, tokens: Sequence[Sequence[int]]) -> tuple[ReferenceDraft, ...]:
        self._read(tokens)
        found = [self.acceptance.possible(cursor) for cursor in self.cursors if cursor is not None]
        return tuple(draft for draft in found if draft.length > 0)

    # ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, slot: int, request: Request) -> None:
        super().admit(slot, request)
        reference = self.references.get(request.key)
        self.cursors[slot] = (
            None if reference is None else ReferenceCursor(reference, len(request.prompt_ids))
        )

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
        if REFERENCE in counters[0]:  # the run may have gone without references before
            self.acceptance.restore(counters[0][REFERENCE])

    def observe(self, proposal: ReferenceProposal, verdicts: Sequence[Verdict]) -> None:
        if proposal.inner is not None:
            self.inner.observe(proposal.inner, verdicts)

    # ── drafting ────────────────────────────────────────────────────────────────────────────────────────────

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, unwanted: Sequence[int] = ()
    ) -> ReferenceProposal:
        self._read(context.tokens)
        if not strategy.uses_references:
            inner = self.inner.propose(context, strategy, noise, unwanted)
            return ReferenceProposal(inner.tree, inner)
        cursors = self.cursors[: len(context.tokens)]
        rows = zip(cursors, context.tokens, context.requests, strict=True)
        drafts = [self.acceptance.draft(*row, strategy.depth, context.vocab_size) for row in rows]
        longest, roots = max(map(len, drafts)), [tokens[-1] for tokens in context.tokens]
        nodes = [
            [root, *draft, *[0] * (longest - len(draft))] for root, draft in zip(roots, drafts, strict=True)
        ]
        tree = chain(upload(nodes, context.device), [1 + len(draft) for draft in drafts])
        pairs = zip(drafts, cursors, strict=True)
        versions = tuple(cursor.version if draft and cursor else None for draft, cursor in pairs)
        unwanted = [row for row, version in enumerate(versions) if version is not None]
        if strategy.without_reference.is_off or len(unwanted) == len(versions):
            return ReferenceProposal(tree, references=versions)
        inner = self.inner.propose(context, strategy.without_reference, noise, unwanted)
        tree = choose_rows(tree, inner.tree, [version is not None for version in versions])
        return ReferenceProposal(tree, inner, references=versions)

    def _read(self, texts: Sequence[Sequence[int]]) -> None:
        """Lets all references of the batch be compared with what was committed since they last were."""
        for cursor, tokens in zip(self.cursors, texts, strict=False):
            if cursor is not None:
                self.acceptance.read(cursor, tokens)
