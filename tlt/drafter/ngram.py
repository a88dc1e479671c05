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
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tlt.drafter.calibration import DEFAULT_CONFIDENCE_THRESHOLD
from tlt.speculative.protocol import DraftContext, Proposal
from tlt.speculative.tree import chain
from tlt.types import DraftTree, Request, Rollout, Strategy, Verdict

ANCHORS = (10, 4)
"""Tokens that have to agree before an occurrence is looked at; the longer anchor is asked first."""

_MAX_MATCH = 48
"""A longer match tells no more."""
_MAX_SOURCES = 8
"""Occurrences looked at per proposal and anchor, the latest first."""
_MAX_TEXTS = 64
"""Responses kept per problem; the oldest finished ones leave first."""

_KEEP = 0.99
"""How much of what was learned about acceptance outlives one more draft."""

DEFAULT_MAX_TOKENS = 200_000
"""Indexed tokens over all problems, about 300 bytes each; problems not asked for the longest leave first."""


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
    """How many tokens before `end` agree with the end of `tokens`, up to `_MAX_MATCH`."""
    limit = min(end, len(tokens), _MAX_MATCH)
    length = 0
    while length < limit and stored[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


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

    Candidates are ranked by log(weight share) / tau + the law's noise, like those of a learned drafter. How likely a draft is
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
        *,
        tau: float = 0.7,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    ) -> None:
        self.max_tokens, self.tau, self.confidence_threshold = max_tokens, tau, confidence_threshold
        self.problems: OrderedDict[str, SuffixIndex] = OrderedDict()
        self.slots: list[tuple[SuffixIndex, int] | None] = [None] * max_slots
        self.hits = [[1.0, 2.0] for _ in range(_match_bucket(_MAX_MATCH) + 1)]  # drafts accepted, drafts tried: a Beta(1, 1)

    @property
    def num_tokens(self) -> int:
        return sum(index.num_tokens for index in self.problems.values())

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

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
        total = self.num_tokens
        running = {id(place[0]) for place in self.slots if place is not None}
        for problem_id, known in list(self.problems.items()):
            if total > self.max_tokens and id(known) not in running:
                total -= self.problems.pop(problem_id).num_tokens

    def withdraw(self, slot: int) -> None:
        """What is known of its text stays for its siblings."""
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        index, text = place
        index.close(text)
        self.slots[slot] = None

    def release(self) -> None:
        """Nothing to do: what has ended is what retrieval reads."""

    def observe(self, proposal: NgramProposal, verdicts: Sequence[Verdict]) -> None:
        """Learns from what the target said, whether or not it was asked about what was retrieved."""
        for row, verdict in zip(proposal.retrieved, verdicts, strict=True):
            if row.nodes:
                successes, has_failed = _walk(row.nodes, verdict.tokens)
                accepted, tried = self.hits[row.bucket]
                self.hits[row.bucket] = [_KEEP * accepted + successes, _KEEP * tried + successes + has_failed]

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def survival(self, retrieved: _Retrieved, depth: int) -> list[float]:
        """Returns how likely this row's draft is to be accepted to depth 1, 2, ... `depth`."""
        accepted, tried = self.hits[retrieved.bucket]
        return [(accepted / tried) ** d if d <= retrieved.depth else 0.0 for d in range(1, depth + 1)]

    def propose(self, context: DraftContext, strategy: Strategy, noise_BDV: Tensor) -> NgramProposal:
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
        rows = [_grow(trie, strategy, self.tau) for trie, _ in tries]
        retrieved = tuple(_Retrieved(_match_bucket(length), nodes) for nodes, (_, length) in zip(rows, tries, strict=True))
        num_nodes = 1 + max(len(nodes) for nodes in rows)
        tokens_BN, parents_BN = [], []
        for committed, nodes in zip(context.tokens, rows, strict=True):
            missing = num_nodes - 1 - len(nodes)
            tokens_BN.append([committed[-1], *(token for token, _ in nodes), *[0] * missing])
            parents_BN.append([-1, *(parent for _, parent in nodes), *[-1] * missing])
        device = noise_BDV.device
        if strategy.width == 1:
            return NgramProposal(
                chain(torch.tensor(tokens_BN, device=device)), retrieved
            )  # with filling, which `stop` cuts off
        tree = DraftTree(torch.tensor(tokens_BN, device=device), torch.tensor(parents_BN, device=device))
        return NgramProposal(tree, retrieved)

    def _continuations(self, slot: int, tokens: Sequence[int], strategy: Strategy) -> tuple[_Node, int]:
        """What followed the longest matches, as a trie (its root has no token), and the length of the longest."""
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


def count_retrieved(group: Sequence[Rollout], counts: Sequence[int]) -> int:
    """How many tokens of responses to one prompt retrieval alone would have drafted, of `counts[i]` first ones of response i.

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


def _walk(nodes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> tuple[int, bool]:
    """How far `tokens` lead down a tree of (token, parent column), and whether its nodes, not its end, stopped them."""
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


def _match_bucket(length: int) -> int:
    """Matches of 0-3, 4-5, 6-7, 8-11, 12-15, 16-23, ... tokens are told apart: two steps per doubling."""
    if length < ANCHORS[-1]:
        return 0
    octave = length.bit_length() - 1
    return 1 + 2 * (octave - 2) + (length >> (octave - 1) & 1)


def _grow(root: _Node, strategy: Strategy, tau: float) -> list[tuple[int, int]]:
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
        scores = [math.log(child.weight) / tau + child.noise for child in children]
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
