"""Retrieval: drafts are the tokens that followed where the last tokens occurred before.

problem ─▶ texts: this sequence, other samples of its prompt, the prompt's responses of earlier epochs
             └─ the last 10 or 4 tokens ─▶ their latest occurrences ─▶ longest match backwards
                                               └─▶ the tokens that followed there, as a trie of candidates
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, Verdict
from tlt.base.uploads import upload
from tlt.drafter.drafting.retrieval.continuations import (
    Branch,
    Retrieved,
    branch_out,
    grow,
    match_bucket,
    walk,
)
from tlt.drafter.drafting.retrieval.suffix_index import MAX_MATCH, SuffixIndex
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal
from tlt.speculation.law.tree import chain

_KEEP = 0.99
"""Factor by which counts of acceptance fade per draft."""

DEFAULT_MAX_TOKENS = 200_000
"""Bounds the tokens of all indexes, about 60 bytes each; the least recently used problems leave first."""


@dataclass(frozen=True)
class NgramProposal(Proposal):
    retrieved: tuple[Retrieved, ...]
    """By row; acceptance is learned whether verified or not."""


class NgramDrafter(Drafter[NgramProposal]):
    """Ranking: log(weight share) / tau + the law's noise. Acceptance is learned by the length of the
    match.
    """

    kinds = ("ngram",)

    def __init__(self, max_slots: int, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.problems: OrderedDict[str, SuffixIndex] = OrderedDict()
        self.slots: list[tuple[SuffixIndex, int] | None] = [None] * max_slots
        # by bucket: tokens accepted, tokens tried; the prior is Beta(1, 1)
        self.hits = [[1.0, 2.0] for _ in range(match_bucket(MAX_MATCH) + 1)]

    @property
    def num_tokens(self) -> int:
        return sum(index.num_tokens for index in self.problems.values())

    # ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, slot: int, request: Request) -> None:
        index = self.problems.setdefault(request.problem_id, SuffixIndex())
        self.problems.move_to_end(request.problem_id)
        self.slots[slot] = (index, index.open_sample(request.prompt_ids))

    def park(self, slot: int, num_positions: int) -> tuple[SuffixIndex, int]:
        return self._text(slot)

    def unpark(self, slot: int, request: Request, parked: tuple[SuffixIndex, int]) -> None:
        """A second text would count its tokens twice."""
        index, text = parked
        if self.problems.get(request.problem_id) is index and index.reopen(text):
            self.problems.move_to_end(request.problem_id)
            self.slots[slot] = parked
        else:
            self.admit(slot, request)

    def move(self, source: int, target: int) -> None:
        self.slots[target], self.slots[source] = self.slots[source], None

    def _text(self, slot: int) -> tuple[SuffixIndex, int]:
        place = self.slots[slot]
        assert place is not None, f"slot {slot} was never admitted"
        return place

    def finish(self, slot: int, rollout: Rollout) -> None:
        index, text = self._text(slot)
        index.extend(text, (*rollout.prompt_ids, *rollout.token_ids))
        self.withdraw(slot)
        self._make_room()

    def _make_room(self) -> None:
        if (total := self.num_tokens) <= self.max_tokens:
            return
        running = {id(place[0]) for place in self.slots if place is not None}
        for problem_id, known in list(self.problems.items()):
            if total <= self.max_tokens:
                break
            if id(known) not in running:
                total -= self.problems.pop(problem_id).num_tokens

    def withdraw(self, slot: int) -> None:
        """The text stays for other samples of the prompt."""
        index, text = self._text(slot)
        index.close(text)
        self.slots[slot] = None

    def observe(self, proposal: NgramProposal, verdicts: Sequence[Verdict]) -> None:
        for row, verdict in zip(proposal.retrieved, verdicts, strict=True):
            if row.nodes:
                accepted, has_failed = walk(row.nodes, verdict.tokens)
                successes, tried = self.hits[row.bucket]
                tried = _KEEP * tried + accepted + has_failed
                self.hits[row.bucket] = [_KEEP * successes + accepted, tried]

    # ── across restarts ─────────────────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, Any]:
        problems = {problem_id: index.ended_texts() for problem_id, index in self.problems.items()}
        return {"hits": [list(pair) for pair in self.hits], "problems": problems}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        self.hits = [list(pair) for pair in counters[0]["hits"]]
        for known in reversed(counters):  # this rank's own texts last: they count as the latest
            for problem_id, texts in known["problems"].items():
                index = self.problems.setdefault(problem_id, SuffixIndex())
                self.problems.move_to_end(problem_id)
                for num_prompt, tokens in texts:
                    text = index.open_sample(tuple(tokens[:num_prompt]))
                    index.extend(text, tokens)
                    index.close(text)
        self._make_room()

    # ── drafting ────────────────────────────────────────────────────────────────────────────────────────────

    def survival(self, retrieved: Retrieved, depth: int) -> list[float]:
        accepted, tried = self.hits[retrieved.bucket]
        num_found = min(retrieved.depth, depth)
        return [(accepted / tried) ** d for d in range(1, num_found + 1)] + [0.0] * (depth - num_found)

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> NgramProposal:
        """Retrieves for discarded rows, too: `observe` compares with the tokens drawn."""
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
        lengths = tuple(1 + len(nodes) for nodes in rows)
        if strategy.width == 1:
            return NgramProposal(chain(nodes_BN, lengths), retrieved)
        return NgramProposal(DraftTree(nodes_BN, upload(parents_BN, device), lengths=lengths), retrieved)

    def _continuations(self, slot: int, tokens: Sequence[int], strategy: Strategy) -> tuple[Branch, int]:
        index, text = self._text(slot)
        index.extend(text, tokens)
        weights: dict[tuple[int, ...], float] = {}
        longest = 0
        for length, source, start in index.sources(tokens):
            longest = max(longest, length)
            followed = tuple(index.texts[source][start : start + strategy.depth])
            weights[followed] = weights.get(followed, 0.0) + length * length
        return branch_out([*weights.items()]), longest

    def _fetch_noise(self, tries: Sequence[Branch], noise: DraftNoise) -> None:
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
