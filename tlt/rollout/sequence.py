"""One response in the making: a request, the tokens committed so far, and when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlt.types import FinishReason, Request, Rollout, Verdict


@dataclass
class Sequence:
    """`tokens` holds prompt and response; the last of them, the root, has not been through the target yet."""

    request: Request
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

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

    def to_rollout(self, policy_version: int) -> Rollout:
        assert self.finish_reason is not None
        request = self.request
        return Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(self.tokens[len(request.prompt_ids) :]),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
        )
