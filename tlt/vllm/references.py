"""References of the sequences that vLLM runs: their next tokens are given to vLLM's scheduler as drafts.

reference ─▶ ReferenceCursor (drafting/reference_drafter.py) ─▶ draft ─▶ Link.give ─▶ verified in this step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlt.drafter.drafting.reference_drafter import ReferenceAcceptance, ReferenceCursor
from tlt.drafter.drafting.references import References
from tlt.engine.sequence import Sequence
from tlt.speculative.strategy import ReferenceDraft, Strategy
from tlt.types import Request


class RunningReferences:
    """Keeps a cursor for every running sequence that has a reference, by the sequence's name."""

    def __init__(self, references: References, vocab_size: int) -> None:
        self.kept, self.acceptance, self.vocab_size = references, ReferenceAcceptance(), vocab_size
        self._cursors: dict[str, ReferenceCursor] = {}

    def enter(self, name: str, request: Request) -> None:
        if (reference := self.kept.get(request.noise_key)) is not None:
            self._cursors[name] = ReferenceCursor(reference, len(request.prompt_ids))

    def leave(self, names: Iterable[str]) -> None:
        for name in names:
            self._cursors.pop(name, None)

    def reference_drafts(self, running: Mapping[str, Sequence]) -> tuple[ReferenceDraft, ...]:
        """Advances every cursor over the committed tokens; returns the drafts that the references allow."""
        for name, cursor in self._cursors.items():
            self.acceptance.read(cursor, running[name].tokens)
        found = [self.acceptance.possible(cursor) for cursor in self._cursors.values()]
        return tuple(draft for draft in found if draft.length > 0)

    def drafts(self, running: Mapping[str, Sequence], strategy: Strategy) -> dict[str, list[int]]:
        """Returns the drafts by sequence name, if any. Call `reference_drafts` first: it reads what was
        committed."""
        found: dict[str, list[int]] = {}
        for name, cursor in self._cursors.items() if strategy.uses_references else ():
            tokens, request = running[name].tokens, running[name].request
            if draft := self.acceptance.draft(cursor, tokens, request, strategy.depth, self.vocab_size):
                found[name] = [*draft]
        return found

    def cover(self, running: Mapping[str, Sequence], depth: int) -> bool:
        """Returns whether every sequence can draft from its reference after a step that verifies up to
        `depth` drafted tokens, where the reference agrees with them. A response ends with a reference that is
        whole. Call `reference_drafts` first."""

        def lasts(cursor: ReferenceCursor) -> bool:
            length = self.acceptance.possible(cursor).length
            return length > 0 and (cursor.is_whole or cursor.num_left > min(depth, length) + 1)

        return len(self._cursors) == len(running) and all(map(lasts, self._cursors.values()))

    def version(self, name: str) -> int:
        """Returns the version of a sequence's reference."""
        return self._cursors[name].version
