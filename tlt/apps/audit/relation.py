"""The invariance relation: the same tokens have the same log-probabilities, bit for bit, however computed.

batch of 1    one request at a time: the other ways are compared with it
batch of N    N requests at a time; of an engine that drafts, the same requests also with its drafts
prefilled     the response, or its first half, read as a prompt
trainer       the update's forward pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tlt.base.types import Request, Rollout, id_of

Answer = Callable[[Sequence[Request]], Sequence[Rollout]]
"""Answers requests, all of them at once, with log-probabilities."""


@dataclass(frozen=True)
class TokenPlace:
    response: int
    problem_id: str
    token: int


@dataclass(frozen=True)
class Relation:
    way: str
    num_missing: int
    """Responses that were not answered in both ways."""
    num_responses: int
    num_equal: int
    """Responses with the same tokens in both ways."""
    num_logprobs: int
    """Up to where a response's tokens part."""
    num_differing: int
    largest: float
    """The largest difference, in nats."""
    first: TokenPlace | None
    """The first log-probability or token that differs."""

    @property
    def verdict(self) -> Literal["invariant", "not invariant", "undecided"]:
        if self.first is not None:
            return "not invariant"
        return "undecided" if self.num_missing or not self.num_logprobs else "invariant"

    @property
    def is_invariant(self) -> bool | None:
        return None if self.verdict == "undecided" else self.verdict == "invariant"

    @property
    def sentence(self) -> str:
        said = f"{self.num_differing:,} of {self.num_logprobs:,} log-probabilities differ"
        said += f", by up to {self.largest:.1e} nats" if self.num_differing else ""
        said += f"; {self.num_equal} of {self.num_responses} responses have the same tokens"
        said += f"; {self.num_missing} responses are missing" if self.num_missing else ""
        if (first := self.first) is not None:
            said += f"; first in response {first.response} ({first.problem_id}), token {first.token}"
        if self.num_equal < self.num_responses and not self.num_differing:
            said += "; if the engine does not repeat a seed's tokens, compare at --temperature 0"
        return f"{self.verdict.replace('not', 'NOT')}: {said}"


def compare(way: str, alone: Sequence[Rollout], others: Sequence[Rollout], num_asked: int) -> Relation:
    """others: in any order; where `logprobs` are fewer than the tokens, they are the last tokens'."""
    found = {id_of(other): other for other in others}
    pairs = [(i, one, found[id_of(one)]) for i, one in enumerate(alone) if id_of(one) in found]
    num_logprobs = num_differing = num_equal = 0
    largest, first = 0.0, None
    for index, one, other in pairs:
        is_equal = one.token_ids == other.token_ids
        num_equal += is_equal
        end = len(one.token_ids) if is_equal else _num_common(one.token_ids, other.token_ids)
        begin = len(other.token_ids) - len(other.logprobs)
        differing = [
            place
            for place in range(begin, end)
            if one.logprobs[place].hex() != other.logprobs[place - begin].hex()
        ]
        num_logprobs += max(end - begin, 0)
        num_differing += len(differing)
        gaps = (abs(one.logprobs[place] - other.logprobs[place - begin]) for place in differing)
        largest = max(largest, *gaps, 0.0)
        if first is None and (differing or not is_equal):
            first = TokenPlace(index, one.problem_id, min([*differing, end]))
    counts = num_equal, num_logprobs, num_differing
    return Relation(way, num_asked - len(pairs), len(pairs), *counts, largest, first)


def _num_common(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def in_batches(answer: Answer, requests: Sequence[Request], size: int) -> list[Rollout]:
    starts = range(0, len(requests), size)
    return [rollout for start in starts for rollout in answer(requests[start : start + size])]


def half_prefilled(answer: Answer, requests: Sequence[Request], alone: Sequence[Rollout]) -> list[Rollout]:
    """Continues each response after its first half; log-probabilities are of the second half."""
    known = {id_of(one): one for one in alone}
    return [_second_half(answer, request, known[id_of(request)]) for request in requests]


def _second_half(answer: Answer, request: Request, known: Rollout) -> Rollout:
    half = len(known.token_ids) // 2
    given = replace(request, token_ids=known.token_ids[:half], logprobs=known.logprobs[:half])
    (rollout,) = answer([given])
    return replace(rollout, logprobs=rollout.logprobs[half:])
