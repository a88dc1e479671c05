"""The report of an audit: what was found of one engine in one mode. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tlt.audit.estimates import Estimate


@dataclass(frozen=True)
class Offender:
    """A token that the target hardly or never says at this place.

    response: the index of its response among all.  position: its index among the response's tokens.
    p, expected_p: the target's probabilities of it and of the likeliest token.
    tail: the target's mass on all tokens that are as unlikely as this one, or more so.
    text, expected_text: filled in where a tokenizer is at hand.
    """

    response: int
    problem_id: str
    sample_index: int
    position: int
    token_id: int
    p: float
    tail: float
    expected_id: int
    expected_p: float
    text: str = ""
    expected_text: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The findings of the audit of one engine, in one mode.

    Fields of the betting game are None at temperature 0, where every token is compared with the likeliest
    one instead.
    """

    mode: str
    reasons: tuple[str, ...]
    """Why the engine is not lossless; empty where nothing was found against it."""
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
    negative if too flat."""
    elsewhere: Estimate | None = None
    """Share of the tokens that come from another source than the target, by maximum likelihood."""
    elsewhere_source: str | None = None
    tokens_for_power: dict[str, int | None] = field(default_factory=dict)
    """Tokens that convict with 95 % power: against each reference fault, or, if the engine is not
    lossless, against what was observed of it. None: more than five million, or no bet grows."""
    num_impossible: int
    num_border: int
    num_wrong: int
    num_near_ties: int
    num_cut_short: int
    num_past_stop: int
    num_copies: int
    """Responses that repeat a long one. They are not judged, and not counted above."""
    logprob_gap: float | None
    """Largest difference between the log-probabilities that the engine reports and the referee's; None: it
    reports none."""
    offenders: tuple[Offender, ...]

    @property
    def verdict(self) -> Literal["lossless", "not lossless", "undecided"]:
        """Undecided: nothing was found, but in so few tokens that a reference fault might not have been
        either, or an estimate speaks against the engine that does not convict it."""
        if self.is_convicted:
            return "not lossless"
        return "lossless" if self.has_enough_tokens and not self.is_doubtful else "undecided"

    @property
    def is_convicted(self) -> bool:
        return bool(self.reasons)

    @property
    def is_lossless(self) -> bool | None:
        """None: undecided."""
        return None if self.verdict == "undecided" else self.verdict == "lossless"

    @property
    def tokens_needed(self) -> int | None:
        """Tokens with which every reference fault would have been found with 95 % power; None: more than
        five million."""
        needed = tuple(self.tokens_for_power.values())
        return None if None in needed else max((tokens for tokens in needed if tokens is not None), default=0)

    @property
    def has_enough_tokens(self) -> bool:
        return self.tokens_needed is not None and self.num_tokens >= self.tokens_needed

    @property
    def is_doubtful(self) -> bool:
        """Whether an interval leaves out what a lossless engine has."""
        is_elsewhere = self.elsewhere is not None and self.elsewhere.low > 0
        return is_elsewhere or (
            self.surprise is not None and not self.surprise.low <= 0 <= self.surprise.high
        )

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_responses

    def with_texts(self, text_of: Callable[[int], str]) -> AuditReport:
        """Returns the report with the offenders' tokens as text, too. text_of: gives the text of a token
        id."""
        return replace(
            self,
            offenders=tuple(
                replace(
                    offender, text=text_of(offender.token_id), expected_text=text_of(offender.expected_id)
                )
                for offender in self.offenders
            ),
        )
