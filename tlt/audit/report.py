"""The report of an audit: what was found of one engine in one mode. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from tlt.audit.estimates import Estimate


@dataclass(frozen=True)
class Offender:
    """A token the target hardly or never says here. tail: the target's mass on tokens as unlikely as this one, or more."""

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


@dataclass(frozen=True)
class AuditReport:
    """What the audit of one mode found. Fields of the betting game are None at temperature 0, where the argmax is checked."""

    mode: str
    is_lossless: bool
    reasons: tuple[str, ...]
    """Why not; empty when lossless."""
    num_responses: int
    num_tokens: int
    alpha: float
    tolerance: float
    log10_e: float | None
    max_log10_e: float | None
    p_value: float | None
    """At most this likely for a lossless engine: min(1, 1 / max e)."""
    detected_at_token: int | None
    best_bet: str | None
    nats_per_token: float | None
    """What the best single bet gained per token."""
    surprise: Estimate | None
    """Mean of log p(y) + entropy of p, in nats; 0 for a lossless engine, above it too sharp, below it too flat."""
    elsewhere: Estimate | None
    """Share of the tokens from another source than the target, by maximum likelihood (95 %: likelihood ratio)."""
    elsewhere_source: str | None
    tokens_for_power: dict[str, int | None]
    """Tokens for 95 % power: against the reference faults, or if not lossless against what was observed. None: more than
    five million, or no growth at all."""
    num_impossible: int
    num_border: int
    num_wrong: int
    num_near_ties: int
    num_cut_short: int
    num_past_stop: int
    num_copies: int
    """Responses that repeat a long one; not judged, and not counted above."""
    logprob_gap: float | None
    """Largest difference between the engine's reported log-probabilities and the referee's; None when it reports none."""
    offenders: tuple[Offender, ...]

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_responses
