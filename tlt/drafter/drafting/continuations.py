"""Ranks what followed these words before, and makes a draft tree of the most confident candidates.

    sources (suffix_index.py) ─▶ trie: who said this token next, and how far they agree with us ─▶ tree

Pure functions of what was found: no drafter, no tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt.drafter.drafting.suffix_index import ANCHORS
from tlt.types import Strategy

_TAU = 0.7
"""The coupling temperature of retrieved candidates (see `LearnedSettings.tau`)."""


@dataclass
class Node:
    """A candidate in the trie of continuations: the weight of the sources that lead to it."""

    token: int
    depth: int
    weight: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)
    noise: float = 0.0


@dataclass(frozen=True)
class Retrieved:
    """A tree of (token, parent column), the root (column 0) left out, and the bucket of the match that led to it."""

    bucket: int
    nodes: list[tuple[int, int]]

    @property
    def depth(self) -> int:
        depths = [0]
        for _, parent in self.nodes:
            depths.append(depths[parent] + 1)
        return max(depths)


def walk(nodes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> tuple[int, bool]:
    """Returns how far `tokens` lead down a tree of (token, parent column), and whether its nodes, not its end, stopped them."""
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
    """Matches of 0-3, 4-5, 6-7, 8-11, 12-15, 16-23, ... tokens are told apart: two steps per doubling."""
    if length < ANCHORS[-1]:
        return 0
    octave = length.bit_length() - 1
    return 1 + 2 * (octave - 2) + (length >> (octave - 1) & 1)


def grow(root: Node, strategy: Strategy) -> list[tuple[int, int]]:
    """Returns (token, parent column) of the `budget` most confident candidates, parents first; column 0 is the tree's root.

    Best first: a node's confidence is the product of its shares on the way from the root.
    """
    nodes: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, Node]] = []
    order = 0

    def offer(parent: Node, column: int, confidence: float) -> None:
        nonlocal order
        if not parent.children or parent.depth >= strategy.depth:
            return
        children = list(parent.children.values())
        scores = [math.log(child.weight) / _TAU + child.noise for child in children]
        top = max(scores)
        total = top + math.log(sum(math.exp(score - top) for score in scores))
        ranked = sorted(zip(scores, children, strict=True), key=lambda pair: -pair[0])[: strategy.width]
        for score, child in ranked:
            order += 1
            heapq.heappush(heap, (-(confidence + score - total), order, column, child))

    offer(root, 0, 0.0)
    while heap and len(nodes) < strategy.budget:
        negative, _, column, node = heapq.heappop(heap)
        nodes.append((node.token, column))
        offer(node, len(nodes), -negative)
    return nodes
