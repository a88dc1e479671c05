"""A response's tokens for the page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tlt.base.types import DraftOutcome

MAX_CHARACTERS = 2000
"""Characters shown of a prompt or response, half at its beginning and half at its end."""
MAX_SHOWN_TOKENS = 800
"""Coloured tokens of a response: 240 drafted responses of this size keep the page below 5 MB."""
DRAFTERS = {"learned": "learned drafter", "ngram": "retrieval", "ahead": "reference"}

Stretch = tuple[int, list[int]]
"""(first token, characters of each token)."""


def clip(
    pieces: Sequence[str], most: int = MAX_CHARACTERS, characters: int = MAX_CHARACTERS
) -> tuple[str, list[Stretch]]:
    """Returns the text to show, and the stretches of its at most `most` pieces."""
    lengths = [len(piece) for piece in pieces]
    starts = [0, *accumulate(lengths)]
    total, half = starts[-1], characters // 2
    if total <= characters and len(pieces) <= most:
        return "".join(pieces), [(0, lengths)]
    head = min(bisect_right(starts, half) - 1, most // 2)
    tail = max(bisect_left(starts, total - half), len(pieces) - most // 2)
    left_out = f"\n[… {starts[tail] - starts[head]:,} characters …]\n"
    text = "".join(pieces[:head]) + left_out + "".join(pieces[tail:])
    return text, [(0, lengths[:head]), (tail, lengths[tail:])]


def drafts_within(
    drafts: Sequence[DraftOutcome], stretches: Sequence[Stretch], text_of: Callable[[int], str]
) -> list[list[Any]]:
    return [
        [*draft[:-1], None if draft.rejected is None else text_of(draft.rejected)]
        for draft in drafts
        if any(draft.place < first + len(lengths) and first <= draft.place + draft.num_accepted
               for first, lengths in stretches)
    ]  # fmt: skip


def sum_up(drafts: Sequence[DraftOutcome], ends: Sequence[int], num_tokens: int) -> str:
    """ends: of the policy's turns, in tokens of the response. num_tokens: the policy's own."""
    if not drafts:
        return f"Drafted and accepted: none of {num_tokens} tokens."
    accepted: Counter[str] = Counter()
    for draft in drafts:
        accepted[draft.drafter] += min(draft.num_accepted, _room(draft, ends))
    num_verified = sum(min(draft.num_accepted + 1, _room(draft, ends)) for draft in drafts)
    num_rejected = sum(draft.num_drafted - draft.num_accepted for draft in drafts)
    by_drafter = ", ".join(f"{DRAFTERS.get(kind, kind)} {num}" for kind, num in accepted.items())
    return (
        f"Drafted and accepted: {accepted.total()} of {num_tokens} tokens ({by_drafter}); {len(drafts)} "
        f"verifications of {num_verified / len(drafts):.2f} tokens; rejected: {num_rejected} drafted tokens."
    )


def _room(draft: DraftOutcome, ends: Sequence[int]) -> int:
    return next((end for end in ends if end > draft.place), draft.place) - draft.place
