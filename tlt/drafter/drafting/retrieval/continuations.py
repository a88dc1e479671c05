"""Makes a draft tree of the continuations that retrieval found.

occurrences (suffix_index.py) ─▶ trie of what followed, weighted by the length of the match ─▶ tree
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.base.strategy import Strategy
from tlt.drafter.drafting.retrieval.suffix_index import ANCHORS

_TAU = 0.7
"""As `LearnedSettings.tau`, for retrieved candidates."""


@dataclass(slots=True)
class Branch:
    """Tokens without a choice, then branches."""

    tokens: tuple[int, ...]
    start: int
    """Index of the first token in the continuations."""
    weight: float
    """Sum over the continuations that lead here."""
    children: list[Branch]
    noise: float = 0.0
    """The law's noise of the first token, where the branch has siblings."""

    @property
    def token(self) -> int:
        return self.tokens[0]

    @property
    def depth(self) -> int:
        return self.start + 1


def branch_out(continuations: Sequence[tuple[tuple[int, ...], float]], start: int = 0) -> Branch:
    """Makes a trie of (tokens, weight) that agree before `start`. Its root may be empty."""
    if not continuations:
        return Branch((), start, 0.0, [])
    texts = [tokens for tokens, _ in continuations]
    least, most = min(texts), max(texts)
    end = start
    while end < len(least) and least[end] == most[end]:  # all texts lie between these two, so they agree, too
        end += 1
    beyond: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for tokens, weight in continuations:
        if len(tokens) > end:
            beyond.setdefault(tokens[end], []).append((tokens, weight))
    children = [branch_out(some, end) for some in beyond.values()]
    return Branch(least[start:end], start, sum(weight for _, weight in continuations), children)


@dataclass(frozen=True)
class Retrieved:
    bucket: int
    """See `match_bucket`."""
    nodes: list[tuple[int, int]]
    """(token, parent column) from column 1 on; column 0 is the root."""

    @property
    def depth(self) -> int:
        depths = [0]
        for _, parent in self.nodes:
            depths.append(depths[parent] + 1)
        return max(depths)


def walk(nodes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> tuple[int, bool]:
    """Returns how far `tokens` lead down a tree, and whether a different token stopped them."""
    children: dict[int, dict[int, int]] = {}
    for column, (token, parent) in enumerate(nodes, start=1):
        children.setdefault(parent, {})[token] = column
    node = 0
    for depth, token in enumerate(tokens):
        if node not in children:
            return depth, False
        if token not in children[node]:
            return depth, True
        node = children[node][token]
    return len(tokens), False


def match_bucket(length: int) -> int:
    """Buckets lengths 0-3, 4-5, 6-7, 8-11, 12-15, 16-23, …: two per doubling."""
    if length < ANCHORS[-1]:
        return 0
    octave = length.bit_length() - 1
    return 1 + 2 * (octave - 2) + (length >> (octave - 1) & 1)


def grow(root: Branch, strategy: Strategy) -> list[tuple[int, int]]:
    """Returns (token, parent column) of the `budget` most confident candidates, by the product of shares,
    parents first."""
    nodes: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, Branch, int]] = []  # the last: place of the candidate in its branch
    order = 0

    def offer(branch: Branch, place: int, column: int, confidence: float) -> None:
        nonlocal order
        if branch.start + place + 1 >= strategy.depth:
            return
        if place + 1 < len(branch.tokens):
            ranked = [(confidence, branch, place + 1)]
        else:
            best = _shares(branch.children)[: strategy.width]
            ranked = [(confidence + share, child, 0) for share, child in best]
        for sure, child, first in ranked:
            order += 1
            heapq.heappush(heap, (-sure, order, column, child, first))

    offer(root, -1, 0, 0.0)
    while heap and len(nodes) < strategy.budget:
        negative, _, column, branch, place = heapq.heappop(heap)
        nodes.append((branch.tokens[place], column))
        offer(branch, place, len(nodes), -negative)
    return nodes


def _shares(branches: Sequence[Branch]) -> list[tuple[float, Branch]]:
    if len(branches) < 2:
        return [(0.0, branch) for branch in branches]
    scores = [math.log(branch.weight) / _TAU + branch.noise for branch in branches]
    top = max(scores)
    total = top + math.log(sum(math.exp(score - top) for score in scores))
    pairs = zip(scores, branches, strict=True)
    return sorted(((score - total, branch) for score, branch in pairs), key=lambda pair: -pair[0])
