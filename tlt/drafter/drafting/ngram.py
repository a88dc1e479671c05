"""Drafting without a model: what followed the last time these words were said.

    problem ─▶ texts: this sequence, its siblings while they run, the same prompt's responses of earlier epochs
                 └─ anchors: the last 4 and the last 10 tokens ─▶ their latest occurrences ─▶ longest match backwards
                                                                       └─▶ what followed there, as a trie of candidates

Knows tokens only: no features, no weights. Everything is a host-side data structure; the one tensor operation of a
proposal fetches the noise of its candidates.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tlt.drafter.drafting.calibration import DEFAULT_CONFIDENCE_THRESHOLD
from tlt.drafter.drafting.suffix_index import ANCHORS, MAX_MATCH, SuffixIndex
from tlt.speculative.protocol import DraftContext, Proposal
from tlt.speculative.tree import chain
from tlt.types import DraftTree, Lead, Request, Rollout, Strategy, Verdict

_TAU = 0.7
"""The coupling temperature of retrieved candidates (see `LearnedSettings.tau`)."""
_KEEP = 0.99
"""The share of what was learned about acceptance that outlives one more draft."""

DEFAULT_MAX_TOKENS = 200_000
"""Indexed tokens over all problems, about 300 bytes each; problems not asked for the longest leave first."""


@dataclass
class _Node:
    """A candidate in the trie of continuations: the weight of the sources that lead to it."""

    token: int
    depth: int
    weight: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)
    noise: float = 0.0


@dataclass(frozen=True)
class _Retrieved:
    """A tree of (token, parent column), the root (column 0) left out, and the bucket of the match that led to it."""

    bucket: int
    nodes: list[tuple[int, int]]

    @property
    def depth(self) -> int:
        depths = [0]
        for _, parent in self.nodes:
            depths.append(depths[parent] + 1)
        return max(depths)


@dataclass(frozen=True)
class NgramProposal(Proposal):
    """retrieved: what was found for each row; learned from whether or not the tree still holds it."""

    retrieved: tuple[_Retrieved, ...]


class NgramDrafter:
    """Retrieval over a problem's own responses. Of use from the first response on, before any drafter is trained.

    Candidates are ranked by log(weight share) / _TAU + the law's noise, like those of a learned drafter. How likely a draft is
    to be accepted is learned by length of the match (`survival`).

    confidence_threshold: as of `LearnedDrafter`.
    """

    kinds = ("ngram",)
    version = 0
    capture = ()

    def __init__(
        self,
        max_slots: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    ) -> None:
        self.max_tokens, self.confidence_threshold = max_tokens, confidence_threshold
        self.problems: OrderedDict[str, SuffixIndex] = OrderedDict()
        self.slots: list[tuple[SuffixIndex, int] | None] = [None] * max_slots
        self.hits = [[1.0, 2.0] for _ in range(match_bucket(MAX_MATCH) + 1)]  # drafts accepted, drafts tried: a Beta(1, 1)

    @property
    def num_tokens(self) -> int:
        return sum(index.num_tokens for index in self.problems.values())

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

    def leads(self, tokens: Sequence[Sequence[int]]) -> tuple[Lead, ...]:
        return ()

    def admit(self, slot: int, request: Request) -> None:
        index = self.problems.get(request.problem_id)
        is_new = index is None
        if index is None:
            index = self.problems[request.problem_id] = SuffixIndex()
        self.problems.move_to_end(request.problem_id)
        self.slots[slot] = (index, index.open(0 if is_new else len(request.prompt_ids)))

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        """Features mean nothing here."""

    def move(self, source: int, target: int) -> None:
        self.slots[target], self.slots[source] = self.slots[source], None

    def recall(self, slot: int, num_positions: int) -> None:
        """Retrieval remembers no feature."""

    def finish(self, slot: int, rollout: Rollout) -> None:
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        index, text = place
        index.extend(text, (*rollout.prompt_ids, *rollout.token_ids))
        self.withdraw(slot)
        self._make_room()

    def _make_room(self) -> None:
        total = self.num_tokens
        running = {id(place[0]) for place in self.slots if place is not None}
        for problem_id, known in list(self.problems.items()):
            if total > self.max_tokens and id(known) not in running:
                total -= self.problems.pop(problem_id).num_tokens

    def withdraw(self, slot: int) -> None:
        """Gives the slot up; what is known of its text stays for its siblings."""
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        index, text = place
        index.close(text)
        self.slots[slot] = None

    def slot_bytes(self, length: int) -> int:
        """Returns 0: what retrieval keeps does not lie on the device."""
        return 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do: what has ended is what retrieval reads."""

    def observe(self, proposal: NgramProposal, verdicts: Sequence[Verdict]) -> None:
        """Learns from what the target said, whether or not it was asked about what was retrieved."""
        for row, verdict in zip(proposal.retrieved, verdicts, strict=True):
            if row.nodes:
                successes, has_failed = _walk(row.nodes, verdict.tokens)
                accepted, tried = self.hits[row.bucket]
                self.hits[row.bucket] = [_KEEP * accepted + successes, _KEEP * tried + successes + has_failed]

    # ── across restarts ──────────────────────────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, Any]:
        problems = {problem_id: index.ended_texts() for problem_id, index in self.problems.items()}
        return {"hits": [list(pair) for pair in self.hits], "problems": problems}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        self.hits = [list(pair) for pair in counters[0]["hits"]]
        for known in reversed(counters):  # this drafter's own texts last: they are the latest
            for problem_id, texts in known["problems"].items():
                index = self.problems.setdefault(problem_id, SuffixIndex())
                self.problems.move_to_end(problem_id)
                for skip, tokens in texts:
                    text = index.open(skip)
                    index.extend(text, tokens)
                    index.close(text)
        self._make_room()

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def survival(self, retrieved: _Retrieved, depth: int) -> list[float]:
        """Returns how likely this row's draft is to be accepted to depth 1, 2, ... `depth`."""
        accepted, tried = self.hits[retrieved.bucket]
        return [(accepted / tried) ** d if d <= retrieved.depth else 0.0 for d in range(1, depth + 1)]

    def propose(
        self, context: DraftContext, strategy: Strategy, noise_BDV: Tensor, unwanted: Sequence[int] = ()
    ) -> NgramProposal:
        """It looks for all rows alike: what was found teaches it, whether or not it is asked for."""
        found = self.retrieve(context, strategy, noise_BDV)
        return self.stop(found, [self.survival(row, strategy.depth) for row in found.retrieved])

    def stop(self, found: NgramProposal, survival: Sequence[Sequence[float]]) -> NgramProposal:
        """Ends each sequence's chain where its survival falls below the threshold; one without a match keeps no node but the
        root."""
        if not found.tree.is_chain:
            return found
        depths = [sum(p >= self.confidence_threshold and p > 0 for p in row) or int(row[0] > 0) for row in survival]
        return replace(found, tree=chain(found.tree.tokens_BN, [1 + depth for depth in depths]))

    def retrieve(self, context: DraftContext, strategy: Strategy, noise_BDV: Tensor) -> NgramProposal:
        """Returns whole drafts, however likely they are to be accepted."""
        tries = [self._continuations(slot, tokens, strategy) for slot, tokens in enumerate(context.tokens)]
        self._fetch_noise([trie for trie, _ in tries], noise_BDV)
        rows = [_grow(trie, strategy) for trie, _ in tries]
        retrieved = tuple(_Retrieved(match_bucket(length), nodes) for nodes, (_, length) in zip(rows, tries, strict=True))
        num_nodes = 1 + max(len(nodes) for nodes in rows)
        tokens_BN, parents_BN = [], []
        for committed, nodes in zip(context.tokens, rows, strict=True):
            missing = num_nodes - 1 - len(nodes)
            tokens_BN.append([committed[-1], *(token for token, _ in nodes), *[0] * missing])
            parents_BN.append([-1, *(parent for _, parent in nodes), *[-1] * missing])
        device = noise_BDV.device
        nodes_BN = torch.tensor(tokens_BN, device=device)
        if strategy.width == 1:
            return NgramProposal(chain(nodes_BN), retrieved)  # with filling, which `stop` cuts off
        return NgramProposal(DraftTree(nodes_BN, torch.tensor(parents_BN, device=device)), retrieved)

    def _continuations(self, slot: int, tokens: Sequence[int], strategy: Strategy) -> tuple[_Node, int]:
        """Returns what followed the longest matches, as a trie (its root has no token), and the length of the longest."""
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        index, text = place
        index.extend(text, tokens)
        root, longest = _Node(-1, 0), 0
        for length, source, start in index.sources(tokens):
            longest = max(longest, length)
            node, weight = root, float(length * length)
            for token in index.texts[source][start : start + strategy.depth]:
                node = node.children.setdefault(token, _Node(token, node.depth + 1))
                node.weight += weight
        return root, longest

    def _fetch_noise(self, tries: Sequence[_Node], noise_BDV: Tensor) -> None:
        """The law's noise of every candidate that has a sibling (ranking one alone needs none): one gather, one
        synchronization."""
        contested: list[tuple[int, _Node]] = []
        for row, root in enumerate(tries):
            stack = [root]
            while stack:
                children = list(stack.pop().children.values())
                stack += children
                if len(children) > 1:
                    contested += [(row, child) for child in children]
        if contested:
            where = torch.tensor([(row, node.depth - 1, node.token) for row, node in contested], device=noise_BDV.device)
            for (_, node), value in zip(contested, noise_BDV[where[:, 0], where[:, 1], where[:, 2]].tolist(), strict=True):
                node.noise = value


def _walk(nodes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> tuple[int, bool]:
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


def _grow(root: _Node, strategy: Strategy) -> list[tuple[int, int]]:
    """(token, parent column) of the `budget` most confident candidates, parents first; column 0 is the tree's root.

    Best first: a node's confidence is the product of its shares on the way from the root.
    """
    nodes: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, _Node]] = []
    order = 0

    def offer(parent: _Node, column: int, confidence: float) -> None:
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
