"""The report of an audit: the findings on one engine in one mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tlt.apps.audit.estimates import Estimate


@dataclass(frozen=True)
class Offender:
    """A token that the target hardly or never says at this position."""

    response: int
    """The index of its response among all."""
    problem_id: str
    sample_index: int
    position: int
    """Its index among the response's tokens."""
    token_id: int
    p: float
    """The target's probability of it."""
    tail: float
    """The target's mass on all tokens that are at most as likely as this one."""
    expected_id: int
    """The likeliest token."""
    expected_p: float
    text: str = ""
    """The token as text, where the model has a tokenizer."""
    expected_text: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The findings of the audit of one engine, in one mode.

    Fields of the betting game are None at temperature 0: there every token is compared with the likeliest
    one.
    """

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
    """Mean of log p(y) + entropy of p, in nats: 0 for a lossless engine, positive if it is too sharp,
    negative if it is too flat."""
    elsewhere: Estimate | None = None
    """Share of the tokens that come from another source than the target, by maximum likelihood."""
    elsewhere_source: str | None = None
    tokens_for_power: dict[str, int | None] = field(default_factory=dict)
    """Tokens that convict with 95 % power: against each reference fault, or, if the engine is not lossless,
    against its observed behaviour. None: more than five million, or no bet grows."""
    num_impossible: int
    num_border: int
    num_wrong: int
    num_near_ties: int
    num_cut_short: int
    num_past_stop: int
    num_copies: int
    """Responses that repeat an earlier, unlikely one. They are not judged, and not counted above."""
    logprob_gap: float | None
    """Largest difference between the engine's log-probabilities and the referee's; None: it reports none."""
    offenders: tuple[Offender, ...]
    num_missing: int = 0
    """Responses that were asked for and did not come: without them no engine is called lossless."""

    @property
    def verdict(self) -> Literal["lossless", "not lossless", "undecided"]:
        """The verdict. Undecided: nothing was found, but the tokens are too few to find a reference fault,
        responses are missing, or an estimate speaks against the engine without convicting it."""
        if self.is_convicted:
            return "not lossless"
        is_whole = self.has_enough_tokens and not self.num_missing
        return "lossless" if is_whole and not self.is_doubtful else "undecided"

    @property
    def is_convicted(self) -> bool:
        return bool(self.reasons)

    @property
    def is_lossless(self) -> bool | None:
        """None: undecided."""
        return None if self.verdict == "undecided" else self.verdict == "lossless"

    @property
    def tokens_needed(self) -> int | None:
        """Tokens that find every reference fault with 95 % power; None: more than five million."""
        needed = [tokens for tokens in self.tokens_for_power.values() if tokens is not None]
        return max(needed, default=0) if len(needed) == len(self.tokens_for_power) else None

    @property
    def has_enough_tokens(self) -> bool:
        return self.tokens_needed is not None and self.num_tokens >= self.tokens_needed

    @property
    def is_doubtful(self) -> bool:
        """Whether an interval excludes the value of a lossless engine."""
        has_other_source = self.elsewhere is not None and self.elsewhere.low > 0
        is_surprising = self.surprise is not None and not self.surprise.low <= 0 <= self.surprise.high
        return has_other_source or is_surprising

    @property
    def has_no_evidence(self) -> bool:
        """Whether nothing speaks against the engine, but the tokens are too few to call it lossless."""
        return not (self.is_convicted or self.is_doubtful or self.has_enough_tokens or self.num_missing)

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_responses

    def with_texts(self, text_of: Callable[[int], str]) -> AuditReport:
        """Adds the text of the offenders' tokens."""
        told = (
            replace(one, text=text_of(one.token_id), expected_text=text_of(one.expected_id))
            for one in self.offenders
        )
        return replace(self, offenders=tuple(told))
