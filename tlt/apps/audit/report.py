"""The findings of an audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tlt.apps.audit.estimates import Estimate


@dataclass(frozen=True)
class Offender:
    response: int
    problem_id: str
    sample_index: int
    position: int
    token_id: int
    p: float
    tail: float
    """The target's mass on tokens at most as likely."""
    expected_id: int
    expected_p: float
    text: str = ""
    expected_text: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Fields of the betting game are None at temperature 0, where every token is compared with the
    likeliest."""

    mode: str
    reasons: tuple[str, ...]
    """Why the engine is not lossless; empty: nothing was found against it."""
    num_responses: int
    num_tokens: int
    alpha: float
    tolerance: float
    log10_e: float | None = None
    max_log10_e: float | None = None
    p_value: float | None = None
    """A lossless engine looks as bad as this with at most this probability: min(1, 1 / max e)."""
    detected_at_token: int | None = None
    best_bet: str | None = None
    nats_per_token: float | None = None
    """Gain of the best single bet, in log wealth per token."""
    surprise: Estimate | None = None
    """Mean of log p(y) + entropy of p, in nats: 0 for a lossless engine, positive if too sharp, negative if
    too flat."""
    elsewhere: Estimate | None = None
    """Share of tokens from another source than the target, by maximum likelihood."""
    elsewhere_source: str | None = None
    tokens_for_power: dict[str, int | None] = field(default_factory=dict)
    """Tokens that convict with 95 % power, by reference fault or, if not lossless, of the observed behaviour.
    None: over five million, or no bet grows."""
    num_impossible: int
    num_border: int
    num_wrong: int
    num_near_ties: int
    num_cut_short: int
    num_past_stop: int
    num_copies: int
    """Responses that repeat an earlier, unlikely response: neither judged nor counted above."""
    logprob_gap: float | None
    """Largest |engine's log-probability − referee's|; None: the engine reports none."""
    offenders: tuple[Offender, ...]
    num_missing: int = 0
    """Requests without a response: an engine with any is not called lossless."""

    @property
    def verdict(self) -> Literal["lossless", "not lossless", "undecided"]:
        if self.is_convicted:
            return "not lossless"
        is_whole = self.has_enough_tokens and not self.num_missing
        return "lossless" if is_whole and not self.is_doubtful else "undecided"

    @property
    def is_convicted(self) -> bool:
        return bool(self.reasons)

    @property
    def is_lossless(self) -> bool | None:
        return None if self.verdict == "undecided" else self.verdict == "lossless"

    @property
    def tokens_needed(self) -> int | None:
        """Tokens that find every reference fault; None: no such number is known."""
        needed = [tokens for tokens in self.tokens_for_power.values() if tokens is not None]
        return max(needed, default=0) if len(needed) == len(self.tokens_for_power) else None

    @property
    def has_enough_tokens(self) -> bool:
        return self.tokens_needed is not None and self.num_tokens >= self.tokens_needed

    @property
    def is_doubtful(self) -> bool:
        has_other_source = self.elsewhere is not None and self.elsewhere.low > 0
        is_surprising = self.surprise is not None and not self.surprise.low <= 0 <= self.surprise.high
        return has_other_source or is_surprising

    @property
    def has_no_evidence(self) -> bool:
        return not (self.is_convicted or self.is_doubtful or self.has_enough_tokens or self.num_missing)

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_responses

    @property
    def sentence(self) -> str:
        size = f"{self.num_tokens} tokens in {self.num_responses} responses (mean {self.mean_tokens:.1f})"
        verdict = f"NOT lossless: {'; '.join(self.reasons)}" if self.is_convicted else self.verdict
        if self.verdict == "undecided" and self.num_missing:
            verdict += f": {self.num_missing} responses are missing"
        elif self.has_no_evidence:
            needed = "over 5 million" if self.tokens_needed is None else f"{self.tokens_needed:,}"
            verdict = f"undecided: no evidence against; needs {needed} tokens, and has {self.num_tokens:,}"
        elif self.verdict == "undecided":
            verdict += ": an estimate speaks against it, and the bets do not convict it; judge more"
        if self.max_log10_e is None:
            return f"{verdict}; {size}; {self.num_near_ties} near-ties"
        surprise, share = self.surprise, self.elsewhere
        assert surprise is not None
        assert share is not None
        stated = self.tokens_for_power.items()
        power = ", ".join(f"{name}: {tokens or 'over 5 million'}" for name, tokens in stated)
        e_value = f"e-value 10^{self.log10_e:.1f}, at most 10^{self.max_log10_e:.1f}"
        return (
            f"{verdict}; {size}; {e_value} (convicts at {1 / self.alpha:g});"
            f" mean log p + entropy {surprise.value:+.4f} [{surprise.low:+.4f}, {surprise.high:+.4f}] nats;"
            f" from elsewhere {share.value:.2%} [{share.low:.2%}, {share.high:.2%}] "
            f"({self.elsewhere_source}); tokens for 95 % power: {power}"
        )

    def with_texts(self, text_of: Callable[[int], str]) -> AuditReport:
        told = (
            replace(one, text=text_of(one.token_id), expected_text=text_of(one.expected_id))
            for one in self.offenders
        )
        return replace(self, offenders=tuple(told))
