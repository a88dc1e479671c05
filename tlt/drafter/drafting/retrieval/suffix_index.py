"""An index of one problem's texts, which finds where the last 10 or 4 tokens (an anchor) occurred before."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

from tlt.base.types import Rollout

ANCHORS = (10, 4)
"""Lengths of the tokens by which an occurrence is found; the longer is looked up first."""

MAX_MATCH = 48
"""Longest match told apart."""
_MAX_SOURCES = 8
"""Most occurrences per lookup, the latest first."""
_MAX_LOOKS = 32
"""Most places compared per lookup; hashes collide."""
_TOKEN, _TOKEN_BITS = "i", 32
"""Type code and bits."""
_MAX_TEXTS = 64
"""Most texts per problem; the oldest complete texts leave first."""


class AnchorTable:
    """The latest place of every anchor of one length, by hash.

    Each place links to the one before (as in LZ77). Anchors with one row share a chain, so places are
    compared token by token.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.table = array("q", [-1]) * 256

    def latest(self, key: int) -> int:
        """Returns -1 where there is none."""
        return self.table[key & (len(self.table) - 1)]

    def read(self, text: int, stored: array[int], ends: range, earlier: array[int]) -> None:
        """Writes to `earlier` the latest place before each. The token at a place follows the anchor."""
        table, mask, length = self.table, len(self.table) - 1, self.length
        for end in ends:
            row = crc32(stored[end - length : end]) & mask
            earlier[end] = table[row]
            table[row] = text << 32 | end

    def hold(self, num_places: int) -> None:
        """Doubles the table until at most half of its rows are used. A row's chain then starts in two
        rows."""
        while 2 * num_places > len(self.table):
            self.table *= 2


class SuffixIndex:
    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self.num_tokens = 0
        self._next_id = 0
        self._tables = tuple(AnchorTable(anchor) for anchor in ANCHORS)
        self._earlier: dict[int, tuple[array[int], ...]] = {}
        self._skips: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._indexed: dict[tuple[int, ...], int] = {}
        """By prompt: the text that indexes it."""
        self._open: set[int] = set()
        self._unread: list[tuple[int, int]] = []
        """(text, length) as they grew since the last lookup: nothing is indexed while nobody looks."""

    def open_sample(self, prompt: tuple[int, ...]) -> int:
        """Opens a text after the prompt, which only one of the prompt's texts indexes."""
        text = self.open(len(prompt) if prompt in self._indexed else 0)
        self._indexed.setdefault(prompt, text)
        self._prompts[text] = prompt
        self.extend(text, prompt)
        return text

    def open(self, skip: int = 0) -> int:
        """Anchors in the first `skip` tokens are not indexed."""
        text = self._next_id
        self._next_id += 1
        self.texts[text] = array(_TOKEN)
        self._earlier[text] = tuple(array("q") for _ in ANCHORS)
        self._skips[text] = skip
        self._open.add(text)
        return text

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """tokens: the whole text; the next lookup indexes its new part."""
        stored = self.texts[text]
        new = len(tokens) - len(stored)
        if new <= 0:
            return
        stored.extend(tokens[-new:])
        self.num_tokens += new
        self._unread.append((text, len(stored)))

    def _read(self) -> None:
        for level, table in enumerate(self._tables):
            table.hold(self.num_tokens)
            for text, length in self._unread:
                earlier = self._earlier[text][level]
                first = max(table.length, self._skips[text], len(earlier))
                earlier.extend([-1] * (length - len(earlier)))
                table.read(text, self.texts[text], range(first, length), earlier)
        self._unread.clear()

    def close(self, text: int) -> None:
        self._open.remove(text)
        num_surplus = max(len(self.texts) - _MAX_TEXTS, 0)
        for oldest in [text for text in self.texts if text not in self._open][:num_surplus]:
            self.num_tokens -= len(self.texts.pop(oldest))  # a place in it ends its chain, see `sources`
            del self._skips[oldest], self._earlier[oldest]
            prompt = self._prompts.pop(oldest, None)
            if prompt is not None and self._indexed[prompt] == oldest:
                self._index_elsewhere(prompt)
        if num_surplus > 0:
            self._unread = [grown for grown in self._unread if grown[0] in self.texts]

    def reopen(self, text: int) -> bool:
        """Returns False for a forgotten text."""
        if text in self.texts:
            self._open.add(text)
        return text in self.texts

    def _index_elsewhere(self, prompt: tuple[int, ...]) -> None:
        heir = next((text for text, own in reversed(self._prompts.items()) if own == prompt), None)
        if heir is None:
            del self._indexed[prompt]
            return
        self._indexed[prompt], self._skips[heir] = heir, 0
        for table, earlier in zip(self._tables, self._earlier[heir], strict=True):
            read = min(len(prompt), len(earlier))
            table.read(heir, self.texts[heir], range(table.length, read), earlier)

    def ended_texts(self) -> list[tuple[int, list[int]]]:
        """Returns (tokens of the prompt, tokens), the oldest first."""
        ended = [(text, stored) for text, stored in self.texts.items() if text not in self._open]
        return [(len(self._prompts.get(text, ())), stored.tolist()) for text, stored in ended]

    def sources(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        if self._unread:
            self._read()
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
    """The other text's last `num` tokens are the digits of a number, the last the highest: the highest
    differing digit ends the match."""
    limit = min(end, num)
    theirs = int.from_bytes(stored[end - limit : end], "little") << (num - limit) * _TOKEN_BITS
    return min(num - -(-(theirs ^ digits).bit_length() // _TOKEN_BITS), limit)


def count_retrieved(group: Sequence[Rollout], counts: Sequence[int]) -> int:
    """Counts tokens that retrieval alone would have drafted right, among the first `counts[i]` of each
    response. Responses grow side by side."""
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
