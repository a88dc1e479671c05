"""An index of the texts of one problem, which finds where the last tokens of a text occurred before.

anchor: the last 10 or 4 tokens ─▶ its latest occurrences ─▶ how far each matches backwards
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

from tlt.base.types import Rollout

ANCHORS = (10, 4)
"""Lengths of the anchors, the tokens by which an occurrence is found; the longer one is looked up first."""

MAX_MATCH = 48
"""Longest match that is told apart."""
_MAX_SOURCES = 8
"""Most occurrences per lookup, the latest first."""
_MAX_LOOKS = 32
"""Most places compared per lookup; some belong to other anchors with the same hash."""
_TOKEN, _TOKEN_BITS = "i", 32
"""Type code and bits of a token in an array."""
_MAX_TEXTS = 64
"""Most texts per problem; the oldest complete ones leave first."""


class AnchorTable:
    """The latest place of every anchor of one length, by the anchor's hash.

    The index keeps the place before each place, so places form chains from the latest to the first (as in
    LZ77 compressors). Anchors whose hashes share a row share a chain, so each place is compared token by
    token.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.table = array("q", [-1]) * 256

    def latest(self, key: int) -> int:
        """Returns the latest place of anchors with this hash; -1: none."""
        return self.table[key & (len(self.table) - 1)]

    def read(self, text: int, stored: array[int], ends: range, earlier: array[int]) -> None:
        """Adds these places of a text; the token at a place follows the anchor. Writes to `earlier` the place
        that was the latest before each."""
        table, mask, length = self.table, len(self.table) - 1, self.length
        for end in ends:
            row = crc32(stored[end - length : end]) & mask
            earlier[end] = table[row]
            table[row] = text << 32 | end

    def hold(self, num_places: int) -> None:
        """Doubles the table until places take at most half of its rows. A row's chain then starts in two
        rows, told apart by one more bit of the hash."""
        while 2 * num_places > len(self.table):
            self.table *= 2


class SuffixIndex:
    """The texts of one problem and the places of their anchors."""

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self.num_tokens = 0
        self._next_id = 0
        self._tables = tuple(AnchorTable(anchor) for anchor in ANCHORS)
        self._earlier: dict[int, tuple[array[int], ...]] = {}
        self._skips: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._indexed: dict[tuple[int, ...], int] = {}
        """By prompt: the text in which it is indexed."""
        self._open: set[int] = set()

    def open_sample(self, prompt: tuple[int, ...]) -> int:
        """Returns a new text that begins with a prompt. Of all texts with this prompt, one indexes it."""
        text = self.open(len(prompt) if prompt in self._indexed else 0)
        self._indexed.setdefault(prompt, text)
        self._prompts[text] = prompt
        self.extend(text, prompt)
        return text

    def open(self, skip: int = 0) -> int:
        """Returns a new text. Anchors in its first `skip` tokens are not indexed."""
        text = self._next_id
        self._next_id += 1
        self.texts[text] = array(_TOKEN)
        self._earlier[text] = tuple(array("q") for _ in ANCHORS)
        self._skips[text] = skip
        self._open.add(text)
        return text

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Indexes what is new in a text, which is given as a whole."""
        stored = self.texts[text]
        new = len(tokens) - len(stored)
        if new <= 0:
            return
        stored.extend(tokens[-new:])
        self.num_tokens += new
        for table, earlier in zip(self._tables, self._earlier[text], strict=True):
            table.hold(self.num_tokens)
            first = max(table.length, self._skips[text], len(earlier))
            earlier.extend([-1] * (len(stored) - len(earlier)))
            table.read(text, stored, range(first, len(stored)), earlier)

    def close(self, text: int) -> None:
        """Marks a text as complete. Beyond `_MAX_TEXTS` the oldest complete ones are forgotten; growing texts
        always stay."""
        self._open.remove(text)
        num_surplus = max(len(self.texts) - _MAX_TEXTS, 0)
        for oldest in [text for text in self.texts if text not in self._open][:num_surplus]:
            self.num_tokens -= len(self.texts.pop(oldest))  # a place in it ends its chain, see `sources`
            del self._skips[oldest], self._earlier[oldest]
            prompt = self._prompts.pop(oldest, None)
            if prompt is not None and self._indexed[prompt] == oldest:
                self._index_elsewhere(prompt)

    def _index_elsewhere(self, prompt: tuple[int, ...]) -> None:
        """Indexes a prompt in the latest text that begins with it; in none if they are all forgotten."""
        heir = next((text for text, own in reversed(self._prompts.items()) if own == prompt), None)
        if heir is None:
            del self._indexed[prompt]
            return
        self._indexed[prompt], self._skips[heir] = heir, 0
        for table, earlier in zip(self._tables, self._earlier[heir], strict=True):
            table.read(heir, self.texts[heir], range(table.length, len(prompt)), earlier)

    def ended_texts(self) -> list[tuple[int, list[int]]]:
        """Returns (tokens of the prompt, tokens) of every complete text, the oldest first, for `open_sample`
        and `extend`."""
        ended = [(text, stored) for text, stored in self.texts.items() if text not in self._open]
        return [(len(self._prompts.get(text, ())), stored.tolist()) for text, stored in ended]

    def sources(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns (length of the match, text, position after it) where the end of `tokens` occurred last."""
        ending = array(_TOKEN, tokens[-MAX_MATCH:])
        digits = int.from_bytes(ending, "little")
        for level, table in enumerate(self._tables):
            if len(ending) < table.length:
                continue
            anchor = ending[-table.length :]
            place, found, num_looks = table.latest(crc32(anchor)), list[tuple[int, int, int]](), 0
            while place >= 0 and len(found) < _MAX_SOURCES and num_looks < _MAX_LOOKS:
                text, end = place >> 32, place & 0xFFFFFFFF
                stored = self.texts.get(text)
                if stored is None:
                    break  # forgotten, and so are all earlier places
                if stored[end - table.length : end] == anchor:
                    found.append((_match_length(stored, end, digits, len(ending)), text, end))
                place = self._earlier[text][level][end]
                num_looks += 1
            if found:
                return found
        return []


def _match_length(stored: array[int], end: int, digits: int, num: int) -> int:
    """Returns how many tokens before `end` agree with the last `num` tokens of a text, which are given as the
    digits of a number, the last token the highest: the highest digit that differs ends the match."""
    limit = min(end, num)
    theirs = int.from_bytes(stored[end - limit : end], "little") << (num - limit) * _TOKEN_BITS
    return min(num - -(-(theirs ^ digits).bit_length() // _TOKEN_BITS), limit)


def count_retrieved(group: Sequence[Rollout], counts: Sequence[int]) -> int:
    """Counts the tokens that retrieval alone would have drafted right, among the first `counts[i]` of each
    response to a prompt.

    The responses grow side by side, as they do while generating. At each token retrieval proposes what
    followed the occurrences with the largest weight.
    """
    index = SuffixIndex()
    texts = [[*rollout.prompt_ids, *rollout.token_ids] for rollout in group]
    places = [index.open_sample(rollout.prompt_ids) for rollout in group]
    num_retrieved = 0
    for position in range(max(counts)):
        lengths = [len(rollout.prompt_ids) + position for rollout in group]
        ends = [min(length, len(text)) for length, text in zip(lengths, texts, strict=True)]
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
