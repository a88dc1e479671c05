"""The texts of one problem, indexed by how they end at every place: where were these words said before?

    texts ─▶ anchors: the last 4 and the last 10 tokens ─▶ their latest occurrences ─▶ longest match backwards

Knows tokens only: no drafter, no strategy, no tensors.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

from tlt.types import Rollout

ANCHORS = (10, 4)
"""Tokens that have to agree before an occurrence is looked at; the longer anchor is asked first."""

MAX_MATCH = 48
"""A longer match tells no more."""
_MAX_SOURCES = 8
"""Occurrences looked at per proposal and anchor, the latest first."""
_MAX_LOOKS = 32
"""Places looked at per proposal and anchor; other anchors may be among them that share a hash."""
_TOKEN, _TOKEN_BITS = "i", 32
"""Type of a token in an array."""
_MAX_TEXTS = 64
"""Responses kept per problem; the oldest finished ones leave first."""


class Occurrences:
    """Where the anchors of one length occurred. A table has the latest place by the anchor's hash, and
    whoever adds a place keeps the one before it, so that places form chains from the latest to the first (as
    in LZ77 compressors).

    Anchors whose hashes share a row share a chain, so each place has to be compared token by token.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.table = array("q", [-1]) * 256

    def latest(self, key: int) -> int:
        """Returns the latest place of anchors of this hash; -1: there is none."""
        return self.table[key & (len(self.table) - 1)]

    def read(self, text: int, stored: array[int], first: int, earlier: array[int]) -> None:
        """Takes in the places of a text from `first` on: the token at each follows an anchor. earlier:
        gets the place that was the latest before."""
        table, mask, length = self.table, len(self.table) - 1, self.length
        for end in range(first, len(stored)):
            row = crc32(stored[end - length : end]) & mask
            earlier.append(table[row])
            table[row] = text << 32 | end

    def hold(self, num_places: int) -> None:
        """Doubles the table where places take more than half of its rows. A row's chain then goes on from
        two rows, by one more bit of the hash."""
        while 2 * num_places > len(self.table):
            self.table *= 2


class SuffixIndex:
    """Texts of one problem, and for every anchor its occurrences."""

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self.num_tokens = 0
        self._next_id = 0
        self._occurrences = tuple(Occurrences(anchor) for anchor in ANCHORS)
        self._earlier: dict[int, tuple[array[int], ...]] = {}
        self._skips: dict[int, int] = {}
        self._open: set[int] = set()

    def open(self, skip: int = 0) -> int:
        """A new text; anchors that end in its first `skip` tokens are not indexed (a sibling's prompt is
        known already)."""
        text = self._next_id
        self._next_id += 1
        self.texts[text] = array(_TOKEN)
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
        for known, earlier in zip(self._occurrences, self._earlier[text], strict=True):
            known.hold(self.num_tokens)
            if (first := max(known.length, self._skips[text])) > len(earlier):
                earlier.extend([-1] * (min(first, len(stored)) - len(earlier)))
            known.read(text, stored, len(earlier), earlier)

    def close(self, text: int) -> None:
        """The text is complete. Beyond `_MAX_TEXTS` the oldest complete ones are forgotten; those that
        still grow stay, however many they are."""
        self._open.remove(text)
        num_surplus = len(self.texts) - _MAX_TEXTS
        if num_surplus > 0:
            for oldest in [text for text in self.texts if text not in self._open][:num_surplus]:
                self._forget(oldest)

    def ended_texts(self) -> list[tuple[int, list[int]]]:
        """Returns (skip, tokens) of every text that is complete, the oldest first: `open` and `extend`
        make the same again."""
        return [
            (self._skips[text], stored.tolist())
            for text, stored in self.texts.items()
            if text not in self._open
        ]

    def _forget(self, text: int) -> None:
        """Occurrences in this text lead nowhere from now on, and so does all that came before them."""
        self.num_tokens -= len(self.texts.pop(text))
        del self._skips[text], self._earlier[text]

    def sources(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """(length of the match, text, position of what followed) for the latest occurrences of the end of
        `tokens`."""
        ending = array(_TOKEN, tokens[-MAX_MATCH:])
        digits = int.from_bytes(ending, "little")
        for level, known in enumerate(self._occurrences):
            if len(ending) < known.length:
                continue
            anchor = ending[-known.length :]
            place, found, num_looks = known.latest(crc32(anchor)), list[tuple[int, int, int]](), 0
            while place >= 0 and len(found) < _MAX_SOURCES and num_looks < _MAX_LOOKS:
                text, end = place >> 32, place & 0xFFFFFFFF
                stored = self.texts.get(text)
                if stored is None:
                    break  # forgotten, and so is all that came before it
                if stored[end - known.length : end] == anchor:
                    found.append((_match_length(stored, end, digits, len(ending)), text, end))
                place = self._earlier[text][level][end]
                num_looks += 1
            if found:
                return found
        return []


def _match_length(stored: array[int], end: int, digits: int, num: int) -> int:
    """Returns how many tokens before `end` agree with a text's last `num`, which are given as the digits
    of a number, the last token the highest: the highest digit in which the two differ ends the match."""
    limit = min(end, num)
    theirs = int.from_bytes(stored[end - limit : end], "little") << (num - limit) * _TOKEN_BITS
    return min(num - -(-(theirs ^ digits).bit_length() // _TOKEN_BITS), limit)


def count_retrieved(group: Sequence[Rollout], counts: Sequence[int]) -> int:
    """Counts the tokens that retrieval alone would have drafted, among the first `counts[i]` of each response
    to a prompt.

    The responses grow side by side, as they do while generating: at each token retrieval knows as much of
    the siblings as of the response itself, and of each match the token that the heaviest sources say.
    """
    index = SuffixIndex()
    texts = [[*rollout.prompt_ids, *rollout.token_ids] for rollout in group]
    places = [index.open(0 if i == 0 else len(rollout.prompt_ids)) for i, rollout in enumerate(group)]
    num_retrieved = 0
    for position in range(max(counts)):
        ends = [
            min(len(rollout.prompt_ids) + position, len(text))
            for rollout, text in zip(group, texts, strict=True)
        ]
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
