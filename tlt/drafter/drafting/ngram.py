"""Drafting without a model: what followed the last time these words were said.

    problem ─▶ texts: this sequence, its siblings while they run, the same prompt's responses of earlier epochs
                 └─ anchors: the last 4 and the last 10 tokens ─▶ their latest occurrences ─▶ longest match backwards
                                                                       └─▶ what followed there, as a trie of candidates

Knows tokens only: no features, no weights. Everything is a host-side data structure; the one tensor
operation of a proposal fetches the noise of its candidates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tlt.drafter.drafting.calibration import DEFAULT_CONFIDENCE_THRESHOLD
from tlt.drafter.drafting.continuations import Branch, Retrieved, branch_out, grow, match_bucket, walk
from tlt.drafter.drafting.suffix_index import MAX_MATCH, SuffixIndex
from tlt.speculative.protocol import DraftContext, Drafter, DraftNoise, Proposal
from tlt.speculative.strategy import Hindsight, Strategy
from tlt.speculative.tree import chain
from tlt.types import DraftTree, Request, Rollout, Verdict
from tlt.uploads import upload

_KEEP = 0.99
"""The share of what was learned about acceptance that outlives one more draft."""

_MAX_LOOKS = 8
"""Chains that are looked up in hindsight at a time. Where a step brings more tokens than they cover, the
rest is left out."""

DEFAULT_MAX_TOKENS = 200_000
"""Indexed tokens over all problems, about 60 bytes each; problems not asked for the longest leave first."""


@dataclass(frozen=True)
class _Watched:
    """What was found for a sequence of `start` tokens.
    num_drafted: how many of it would have been drafted."""

    start: int
    retrieved: Retrieved
    num_drafted: int


@dataclass(frozen=True)
class NgramProposal(Proposal):
    """retrieved: what was found for each row; learned from whether or not the tree still holds it."""

    retrieved: tuple[Retrieved, ...]


class NgramDrafter(Drafter[NgramProposal]):
    """Retrieval over a problem's own responses. Of use from the first response on, before any drafter is
    trained.

    Candidates are ranked by log(weight share) / tau + the law's noise, like those of a learned drafter
    (continuations.py). How likely a draft is to be accepted is learned by length of the match (`survival`).

    confidence_threshold: as of `LearnedDrafter`.
    """

    kinds = ("ngram",)

    def __init__(
        self,
        max_slots: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    ) -> None:
        self.max_tokens, self.confidence_threshold = max_tokens, confidence_threshold
        self.problems: OrderedDict[str, SuffixIndex] = OrderedDict()
        self.slots: list[tuple[SuffixIndex, int] | None] = [None] * max_slots
        self.watched: _Watched | None = None
        self._is_asked = False
        self.hits = [
            [1.0, 2.0] for _ in range(match_bucket(MAX_MATCH) + 1)
        ]  # drafts accepted, drafts tried: a Beta(1, 1)

    @property
    def num_tokens(self) -> int:
        return sum(index.num_tokens for index in self.problems.values())

    # ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────

    def hindsight(self, tokens: Sequence[Sequence[int]]) -> tuple[Hindsight, ...]:
        """Watches the sequence in the first slot alone, while neither retrieval nor the hybrid drafts.
        Where sources disagree, candidates are ranked without the law's noise, which makes retrieval look a
        little worse than it is."""
        if self._is_asked:  # then verdicts tell
            self._is_asked, self.watched = False, None
            return ()
        text, found = tokens[0], []
        watched = self.watched or self._watch(text)
        for _ in range(_MAX_LOOKS):
            came = text[watched.start : watched.start + watched.num_drafted + 1]
            accepted, has_failed = walk(watched.retrieved.nodes, came)
            if not has_failed and len(came) <= watched.num_drafted:
                self.watched = watched  # right so far
                break
            self._count(watched.retrieved, accepted, has_failed)
            found.append(Hindsight(watched.num_drafted, min(accepted, watched.num_drafted)))
            watched = self._watch(text[: watched.start + found[-1].accepted + 1])
        else:
            self.watched = None
        return tuple(found)

    def _watch(self, text: Sequence[int]) -> _Watched:
        """Returns what a verification would draft after this text of the first slot."""
        trie, length = self._continuations(0, text, Hindsight.STRATEGY)
        retrieved = Retrieved(match_bucket(length), grow(trie, Hindsight.STRATEGY))
        return _Watched(
            len(text), retrieved, self._num_drafted(self.survival(retrieved, Hindsight.STRATEGY.depth))
        )

    def admit(self, slot: int, request: Request) -> None:
        index = self.problems.get(request.problem_id)
        is_new = index is None
        if index is None:
            index = self.problems[request.problem_id] = SuffixIndex()
        self.problems.move_to_end(request.problem_id)
        self.slots[slot] = (index, index.open(0 if is_new else len(request.prompt_ids)))

    def move(self, source: int, target: int) -> None:
        self.slots[target], self.slots[source] = self.slots[source], None

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
        self.watched = self.watched if slot else None

    def observe(self, proposal: NgramProposal, verdicts: Sequence[Verdict]) -> None:
        """Learns from what the target said, whether or not it was asked about what was retrieved."""
        for row, verdict in zip(proposal.retrieved, verdicts, strict=True):
            self._count(row, *walk(row.nodes, verdict.tokens))

    def _count(self, retrieved: Retrieved, accepted: int, has_failed: bool) -> None:
        if retrieved.nodes:
            successes, tried = self.hits[retrieved.bucket]
            self.hits[retrieved.bucket] = [
                _KEEP * successes + accepted,
                _KEEP * tried + accepted + has_failed,
            ]

    # ── across restarts ─────────────────────────────────────────────────────────────────────────────────────

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

    # ── drafting ────────────────────────────────────────────────────────────────────────────────────────────

    def survival(self, retrieved: Retrieved, depth: int) -> list[float]:
        """Returns how likely this row's draft is to be accepted to depth 1, 2, ... `depth`."""
        accepted, tried = self.hits[retrieved.bucket]
        num_found = min(retrieved.depth, depth)
        return [(accepted / tried) ** d for d in range(1, num_found + 1)] + [0.0] * (depth - num_found)

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, unwanted: Sequence[int] = ()
    ) -> NgramProposal:
        """It looks for all rows alike: what was found teaches it, whether or not it is asked for."""
        found = self.retrieve(context, strategy, noise)
        return self.stop(found, [self.survival(row, strategy.depth) for row in found.retrieved])

    def stop(self, found: NgramProposal, survival: Sequence[Sequence[float]]) -> NgramProposal:
        """Ends each sequence's chain where its survival falls below the threshold; one without a match
        keeps no node but the root."""
        if not found.tree.is_chain:
            return found
        return replace(
            found, tree=chain(found.tree.tokens_BN, [1 + self._num_drafted(row) for row in survival])
        )

    def _num_drafted(self, survival: Sequence[float]) -> int:
        return sum(p >= self.confidence_threshold and p > 0 for p in survival) or int(survival[0] > 0)

    def retrieve(self, context: DraftContext, strategy: Strategy, noise: DraftNoise) -> NgramProposal:
        """Returns whole drafts, however likely they are to be accepted."""
        self._is_asked = True
        tries = [self._continuations(slot, tokens, strategy) for slot, tokens in enumerate(context.tokens)]
        self._fetch_noise([trie for trie, _ in tries], noise)
        rows = [grow(trie, strategy) for trie, _ in tries]
        retrieved = tuple(
            Retrieved(match_bucket(length), nodes) for nodes, (_, length) in zip(rows, tries, strict=True)
        )
        num_nodes = 1 + max(len(nodes) for nodes in rows)
        tokens_BN, parents_BN = [], []
        for committed, nodes in zip(context.tokens, rows, strict=True):
            missing = num_nodes - 1 - len(nodes)
            tokens_BN.append([committed[-1], *(token for token, _ in nodes), *[0] * missing])
            parents_BN.append([-1, *(parent for _, parent in nodes), *[-1] * missing])
        device = context.device
        nodes_BN = upload(tokens_BN, device)
        if strategy.width == 1:
            return NgramProposal(chain(nodes_BN), retrieved)  # with filling, which `stop` cuts off
        return NgramProposal(DraftTree(nodes_BN, upload(parents_BN, device)), retrieved)

    def _continuations(self, slot: int, tokens: Sequence[int], strategy: Strategy) -> tuple[Branch, int]:
        """Returns what followed the longest matches, as a trie, and the length of the longest."""
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        index, text = place
        index.extend(text, tokens)
        weights: dict[tuple[int, ...], float] = {}
        longest = 0
        for length, source, start in index.sources(tokens):
            longest = max(longest, length)
            followed = tuple(index.texts[source][start : start + strategy.depth])
            weights[followed] = weights.get(followed, 0.0) + length * length
        return branch_out([*weights.items()]), longest

    def _fetch_noise(self, tries: Sequence[Branch], noise: DraftNoise) -> None:
        """The law's noise of every candidate that has a sibling (ranking one alone needs none)."""
        contested: list[tuple[int, Branch]] = []
        for row, root in enumerate(tries):
            stack = [root]
            while stack:
                children = stack.pop().children
                stack += children
                if len(children) > 1:
                    contested += [(row, child) for child in children]
        if contested:
            values = noise.of_tokens([(row, node.depth - 1, node.token) for row, node in contested])
            for (_, node), value in zip(contested, values, strict=True):
                node.noise = value
