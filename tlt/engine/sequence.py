"""One response in the making: a request, the tokens committed so far, and when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tlt.types import FinishReason, Request, Rollout, Verdict


@dataclass
class Sequence:
    """`tokens` holds prompt and response; the last of them, the root, has not been through the target yet."""

    request: Request
    max_tokens: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @staticmethod
    def start(request: Request, window: int) -> Sequence:
        """Starts from the prompt, or from where another engine left off. `window`: positions that the model has."""
        max_tokens = min(request.params.max_tokens, window - len(request.prompt_ids))
        return Sequence(request, max_tokens, [*request.prompt_ids, *request.token_ids], list(request.logprobs))

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt_ids) :])

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.max_tokens - len(self.logprobs)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values the cache holds: all but the root."""
        return len(self.tokens) - 1

    def commit(self, verdict: Verdict) -> int:
        """Appends what was verified, up to a stop token or the limit; returns how many tokens were kept."""
        before = len(self.logprobs)
        for token, logprob in zip(verdict.tokens, verdict.logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token in self.request.params.stop_ids:
                self.finish_reason = "stop"
                break
            if len(self.logprobs) == self.max_tokens:
                self.finish_reason = "length"
                break
        return len(self.logprobs) - before

    def to_request(self) -> Request:
        """Returns the request with the tokens that it has so far: another engine goes on from there."""
        return replace(self.request, token_ids=self.response_ids, logprobs=tuple(self.logprobs))

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
        )
