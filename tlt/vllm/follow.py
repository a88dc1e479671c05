"""References beside the sequences that vLLM runs: what each says next is given to vLLM's scheduler as its draft.

    reference ─▶ Follower (drafting/ahead.py), read beside the sequence ─▶ draft ─▶ Link.give ─▶ verified in this step

Knows no vLLM and no tuner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlt.drafter.drafting.ahead import Follower, Leading
from tlt.drafter.drafting.references import References
from tlt.engine.sequence import Sequence
from tlt.types import Lead, Request, Strategy


class Following:
    """Keeps a follower for every running sequence that has a reference, by the sequence's name."""

    def __init__(self, references: References, vocab_size: int) -> None:
        self.references, self.leading, self.vocab_size = references, Leading(), vocab_size
        self._followers: dict[str, Follower] = {}

    def enter(self, name: str, request: Request) -> None:
        if (reference := self.references.get(request.key)) is not None:
            self._followers[name] = Follower(reference, len(request.prompt_ids))

    def leave(self, names: Iterable[str]) -> None:
        for name in names:
            self._followers.pop(name, None)

    def leads(self, running: Mapping[str, Sequence]) -> tuple[Lead, ...]:
        """Lets all references be compared with what was committed; returns how far those lead that lead anywhere."""
        for name, follower in self._followers.items():
            self.leading.read(follower, running[name].tokens)
        found = [self.leading.lead(follower) for follower in self._followers.values()]
        return tuple(lead for lead in found if lead.length > 0)

    def drafts(self, running: Mapping[str, Sequence], strategy: Strategy) -> dict[str, list[int]]:
        """Returns the drafts of the sequences whose references lead somewhere. `leads` has read what was committed."""
        if not strategy.follows:
            return {}
        asked = [(name, running[name], follower) for name, follower in self._followers.items()]
        depth, vocab_size = strategy.depth, self.vocab_size
        drafts = {name: self.leading.draft(f, one.tokens, one.request, depth, vocab_size) for name, one, f in asked}
        return {name: [*draft] for name, draft in drafts.items() if draft}

    def version(self, name: str) -> int | str:
        """Returns the version of a sequence's reference."""
        return self._followers[name].version
