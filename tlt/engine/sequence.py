"""An unfinished response, and when it ends: by its tokens alone, not by drafts or engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from tlt.base.types import DraftOutcome, Drafts, FinishReason, Request, Rollout, UserError, Verdict

Decode = Callable[[list[int]], str]
"""Token ids → text. Further tokens only append, except that _NO_CHARACTER ends the text while bytes of a
character are missing."""

_NO_CHARACTER = "\ufffd"

_SPARE_TOKENS = 8

ROUTED_TOKENS = 64
Routes = Literal["none", "first", "all"]
"""Tokens whose experts are recorded: none, the first ROUTED_TOKENS of a response, or all that are read."""


@dataclass
class Sequence:
    """`tokens` holds prompt and response; the target has not read the last one, the root."""

    request: Request
    max_tokens: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    drafts: list[DraftOutcome] | None = None
    finish_reason: FinishReason | None = None
    routes: list[Tensor] = field(default_factory=list)
    """Of tokens that the target has read, [n, routes] each."""
    routed_from: int = 0
    """Position of the first of them."""

    @staticmethod
    def start(request: Request, window: int, decode: Decode | None = None) -> Sequence:
        """Another engine's response goes on, cut at its end if it contains one."""
        max_tokens = min(request.params.max_tokens, window - len(request.prompt_ids))
        drafts = None if request.drafts is None else [*request.drafts]
        settled = request.token_ids[: _num_settled(request)]
        sequence = Sequence(request, max_tokens, [*request.prompt_ids, *settled], drafts=drafts)
        sequence.logprobs += request.logprobs[: len(settled)]
        sequence.extend(request.token_ids[len(settled) :], request.logprobs[len(settled) :], decode)
        return sequence

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt_ids) :])

    @property
    def recorded_drafts(self) -> Drafts:
        return None if self.drafts is None else tuple(self.drafts)

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def num_left(self) -> int:
        return self.max_tokens - len(self.logprobs)

    @property
    def num_cached(self) -> int:
        """All but the root."""
        return len(self.tokens) - 1

    @property
    def begins_later_turn(self) -> bool:
        turns = self.request.turns
        return turns is not None and 0 < turns.num_settled == len(self.logprobs)

    @property
    def needs_first_routes(self) -> bool:
        """Whether routes "first" still misses some. They are of responses that one engine drew alone."""
        return not self.request.token_ids and self.num_tokens <= ROUTED_TOKENS

    def note_read(self, first: int, routes_TR: Tensor) -> None:
        """Keeps a prefill's routes, from position `first` on. Tokens of earlier turns, and those that another
        engine drew, keep their routes, like their log-probabilities."""
        if not self.routes and (drawn := self.request.routes) is not None:
            rows_TR = torch.frombuffer(bytearray(drawn), dtype=torch.uint8).view(-1, routes_TR.shape[1])
            self.routes.append(rows_TR.to(routes_TR.device))
        num_known = sum(map(len, self.routes))
        assert first <= num_known, "a token was read without its routes"
        self.routes.append(routes_TR[num_known - first :])

    def note_routes(self, routes_NR: Tensor, of_all: bool) -> None:
        """Comes before `commit`. of_all: False: of the response's first ROUTED_TOKENS, without the prompt's
        last token, which the same forward reads."""
        if not of_all:
            if not self.needs_first_routes:
                return
            self.routed_from = len(self.request.prompt_ids)
            routes_NR = routes_NR[0 if self.num_tokens else 1 :][
                : ROUTED_TOKENS + 1 - max(self.num_tokens, 1)
            ]
        self.routes.append(routes_NR)

    def commit(self, verdict: Verdict, decode: Decode | None = None, drafter: str = "") -> int:
        """Returns how many tokens were kept."""
        if verdict.num_drafted and self.drafts is not None:
            counts = verdict.num_drafted, verdict.num_accepted
            self.drafts.append(DraftOutcome(self.num_tokens, drafter, *counts, verdict.rejected))
        return self.extend(verdict.tokens, verdict.logprobs, decode)

    def extend(
        self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], decode: Decode | None = None
    ) -> int:
        """Appends up to a stop token, a stop text or the limit; returns how many tokens were kept."""
        before, params = len(self.logprobs), self.request.params
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token in params.stop_ids:
                self.finish_reason = "stop"
                break
            if len(self.logprobs) >= self.max_tokens:
                self.finish_reason = "length"
                break
        if decode is not None and params.stop and len(self.logprobs) > before:
            self._end_at_stop_text(decode, len(self.logprobs) - before)
        return len(self.logprobs) - before

    def _end_at_stop_text(self, decode: Decode, num: int) -> None:
        """Cuts behind the first of the last `num` tokens that completes a stop text. One look at all of them
        mostly excludes it."""
        end = len(self.tokens)
        can_vanish = any(_NO_CHARACTER in text for text in self.request.params.stop)
        if not can_vanish and not self._says_stop(decode, end, num):
            return
        found = next((e for e in range(end - num + 1, end + 1) if self._says_stop(decode, e)), None)
        if found is not None:
            del self.tokens[found:]
            del self.logprobs[found - len(self.request.prompt_ids) :]
            self.finish_reason = "stop"

    def _says_stop(self, decode: Decode, end: int, num: int = 1) -> bool:
        """Whether one of the `num` tokens before `end` completes a stop text.

        A stop text of n bytes lies within n tokens of at least a byte. Special tokens may decode to nothing,
        so the reach doubles until n letters precede the new tokens'.
        """
        if not (stop := self.request.params.stop):
            return False
        num_bytes = max(len(text.encode()) for text in stop)
        first = len(self.request.prompt_ids) + _num_settled(self.request)
        reach = num - 1 + num_bytes + _SPARE_TOKENS
        while True:
            begin = max(first, end - reach)
            latest = decode(self.tokens[begin:end])
            if any(text in latest for text in stop):
                return True
            if begin == first or len(latest) >= num_bytes + len(decode(self.tokens[end - num : end])):
                return False
            reach *= 2

    def to_request(self) -> Request:
        logprobs, drafts = tuple(self.logprobs), self.recorded_drafts
        routes = None if self.routed_from else self._recorded_routes()
        return replace(
            self.request, token_ids=self.response_ids, logprobs=logprobs, drafts=drafts, routes=routes
        )

    def to_rollout(self, policy_version: int) -> Rollout:
        assert self.finish_reason is not None
        request = self.request
        return Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            token_ids=self.response_ids,
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            drafts=self.recorded_drafts,
            routes=self._recorded_routes(),
            turns=request.turns,
        )

    def _recorded_routes(self) -> bytes | None:
        """Without rows of tokens that were cut off."""
        if not self.routes:
            return None
        rows = torch.cat(self.routes)[: self.num_cached - self.routed_from].to("cpu", torch.uint8)
        return rows.numpy().tobytes()


def _num_settled(request: Request) -> int:
    """Tokens of earlier turns, in which nothing ends the response."""
    return 0 if request.turns is None else request.turns.num_settled


def check_request(request: Request, window: int, decodes: bool) -> None:
    """Raises UserError. decodes: whether stop texts can be found."""
    prompt, length = f"prompt of problem {request.problem_id!r}", len(request.prompt_ids)
    if not length:
        raise UserError(f"{prompt} is empty; give it at least one token")
    if length >= window:
        raise UserError(
            f"{prompt} has {length} tokens; the model's window is {window}, so shorten it to at most "
            f"{window - 1}"
        )
    if len(request.token_ids) != len(request.logprobs):
        has = f"{len(request.token_ids)} token_ids but {len(request.logprobs)} logprobs"
        raise UserError(
            f"response to problem {request.problem_id!r} has {has}; give one each, to go on from there"
        )
    if request.params.stop and not decodes:
        raise UserError(
            f"sampling: stop is {request.params.stop!r}, but the model's folder has no tokenizer; give "
            "stop_ids"
        )


def broken_policy(version: int, dtype: torch.dtype, sequence: Sequence) -> UserError:
    # the noise is bounded and truncation keeps the largest logit, so only a logit can be at fault
    request, name = sequence.request, str(dtype).removeprefix("torch.")
    return UserError(
        f"policy {version} gives logits that are not finite (problem {request.problem_id!r}, sample "
        f"{request.sample_index}, position {len(sequence.tokens)}); its weights are broken or too large for "
        f"{name}: load others, or a wider dtype"
    )
