"""The texts of one problem, indexed by how they end at every place: where were these words said before?

    texts ─▶ anchors: the last 4 and the last 10 tokens ─▶ their latest occurrences ─▶ longest match backwards

Knows tokens only: no drafter, no strategy, no tensors.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from tlt.types import Rollout

ANCHORS = (10, 4)
"""Tokens that have to agree before an occurrence is looked at; the longer anchor is asked first."""

MAX_MATCH = 48
"""A longer match tells no more."""
_MAX_SOURCES = 8
"""Occurrences looked at per proposal and anchor, the latest first."""
_MAX_TEXTS = 64
"""Responses kept per problem; the oldest finished ones leave first."""


class SuffixIndex:
    """Texts of one problem, and for every anchor its occurrences as a chain from the latest to the first (as LZ77
    compressors keep them)."""

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self.num_tokens = 0
        self._next_id = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in ANCHORS)
        self._earlier: dict[int, tuple[array[int], ...]] = {}
        self._skips: dict[int, int] = {}
        self._open: set[int] = set()

    def open(self, skip: int = 0) -> int:
        """A new text; anchors that end in its first `skip` tokens are not indexed (a sibling's prompt is known already)."""
        text = self._next_id
        self._next_id += 1
        self.texts[text] = array("q")
        self._earlier[text] = tuple(array("q") for _ in ANCHORS)
        self._skips[text] = skip
        self._open.add(text)
        return text

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """`tokens` is the whole text; what is new of it is indexed."""
        stored = self.texts[text]
        new = len(tokens) - len(stored)
        if new <= 0:
            return
        stored.extend(tokens[-new:])
        self.num_tokens += new
        skip = self._skips[text]
        for anchor, latest, earlier in zip(ANCHORS, self._latest, self._earlier[text], strict=True):
            for end in range(len(earlier), len(stored)):  # the token at `end` is what followed the anchor
                if end < max(anchor, skip):
                    earlier.append(-1)
                    continue
                key = _anchor_key(stored, end, anchor)
                earlier.append(latest.get(key, -1))
                latest[key] = text << 32 | end

    def close(self, text: int) -> None:
        """The text is complete. Beyond `_MAX_TEXTS` the oldest complete ones are forgotten; those that still grow stay, however
        many they are."""
        self._open.remove(text)
        num_surplus = len(self.texts) - _MAX_TEXTS
        if num_surplus > 0:
            for oldest in [text for text in self.texts if text not in self._open][:num_surplus]:
                self._forget(oldest)

    def ended_texts(self) -> list[tuple[int, list[int]]]:
        """Returns (skip, tokens) of every text that is complete, the oldest first: `open` and `extend` make the same again."""
        return [(self._skips[text], stored.tolist()) for text, stored in self.texts.items() if text not in self._open]

    def _forget(self, text: int) -> None:
        """Occurrences in this text lead nowhere from now on, and so does all that came before them."""
        stored, skip = self.texts.pop(text), self._skips.pop(text)
        del self._earlier[text]
        self.num_tokens -= len(stored)
        for anchor, latest in zip(ANCHORS, self._latest, strict=True):
            for end in range(max(anchor, skip), len(stored)):
                key = _anchor_key(stored, end, anchor)
                if latest.get(key, -1) >> 32 == text:
                    del latest[key]

    def sources(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """(length of the match, text, position of what followed) for the latest occurrences of the end of `tokens`."""
        for level, anchor in enumerate(ANCHORS):
            if len(tokens) < anchor:
                continue
            ending = tuple(tokens[-anchor:])
            place = self._latest[level].get(hash(ending), -1)
            found: list[tuple[int, int, int]] = []
            while place >= 0 and len(found) < _MAX_SOURCES:
                text, end = place >> 32, place & 0xFFFFFFFF
                stored = self.texts.get(text)
                if stored is None:
                    break  # forgotten, and so is all that came before it
                length = _match_length(stored, end, tokens)
                if length >= anchor:
                    found.append((length, text, end))
                place = self._earlier[text][level][end]
            if found:
                return found
        return []


def _anchor_key(stored: array[int], end: int, anchor: int) -> int:
    """Names the `anchor` tokens before `end`. Two that differ may share a name: a match is counted token by token."""
    return hash(tuple(stored[end - anchor : end]))


def _match_length(stored: Sequence[int], end: int, tokens: Sequence[int]) -> int:
    """Returns how many tokens before `end` agree with the end of `tokens`, up to `MAX_MATCH`."""
    limit = min(end, len(tokens), MAX_MATCH)
    length = 0
    while length < limit and stored[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def count_retrieved(group: Sequence[Rollout], counts: Sequence[int]) -> int:
    """Counts the tokens that retrieval alone would have drafted, among the first `counts[i]` of each response to a prompt.

    The responses grow side by side, as they do while generating: at each token retrieval knows as much of the siblings as of
    the response itself, and of each match the token that the heaviest sources say.
    """
    index = SuffixIndex()
    texts = [[*rollout.prompt_ids, *rollout.token_ids] for rollout in group]
    places = [index.open(0 if i == 0 else len(rollout.prompt_ids)) for i, rollout in enumerate(group)]
    num_retrieved = 0
    for position in range(max(counts)):
        ends = [min(len(rollout.prompt_ids) + position, len(text)) for rollout, text in zip(group, texts, strict=True)]
        for place, text, end in zip(places, texts, ends, strict=True):
            index.extend(place, text[:end])
        for text, end, count in zip(texts, ends, counts, strict=True):
            if position >= count:
                continue
            votes: Counter[int] = Counter()
            for length, source, start in index.sources(text[:end]):
                for token in index.texts[source][start : start + 1]:
                    votes[token] += length * length
            num_retrieved += bool(votes) and votes.most_common(1)[0][0] == text[end]
    return num_retrieved
