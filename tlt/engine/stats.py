"""An engine's statistics: tokens, verifications and seconds, in total and by strategy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tlt.base.records import TimedStep
from tlt.speculation.tuner.protocol import Choice, StepOutcome


@dataclass
class StrategyStats:
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds

    def record(self, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self.num_tokens += outcome.num_tokens
        self.seconds += outcome.seconds

    def add(self, other: StrategyStats) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class EngineStats:
    """num_drafts: verifications of at least one drafted token.
    survivors_by_depth: drafts accepted to depth 1, 2, …
    num_preemptions: sequences returned to the queue for lack of memory.
    num_reread_tokens: tokens prefilled again after preemptions, or for a further turn.
    num_kept_tokens: tokens of responses that went on with a further turn, which were not prefilled again.
    followed_by_age: accepted tokens of references, by updates since the reference's policy.
    predicted_seconds: of the steps whose speed the tuner predicted.
    won_seconds: saved by references: predicted seconds without them, less measured seconds.
    sequence_seconds: sum over engine steps of running sequences x seconds.
    latest: None where the latest engine step admitted sequences.
    """

    num_tokens: int = 0
    num_verifications: int = 0
    num_verified_tokens: int = 0
    num_drafted_tokens: int = 0
    num_drafts: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_reread_tokens: int = 0
    num_kept_tokens: int = 0
    by_strategy: dict[str, StrategyStats] = field(default_factory=lambda: defaultdict(StrategyStats))
    survivors_by_depth: Counter[int] = field(default_factory=Counter)
    followed_by_age: Counter[str] = field(default_factory=Counter)
    predicted_seconds: float = 0.0
    won_seconds: float = 0.0
    sequence_seconds: float = 0.0
    latest: TimedStep | None = None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, bonus token included; None without speculation."""
        return self.num_verified_tokens / self.num_verifications if self.num_verifications else None

    # The others are vLLM's, by its definitions.

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens, all candidates of a tree included."""
        return self.survivors_by_depth.total() / self.num_drafted_tokens if self.num_drafted_tokens else None

    @property
    def draft_mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens / drafts. Unlike in `accept_length`, tokens behind a stop token count."""
        return 1 + self.survivors_by_depth.total() / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate_pos(self) -> list[float]:
        """Share of all drafts, short ones included, accepted to position 1, 2, …"""
        return [self.survivors_by_depth[d] / self.num_drafts for d in sorted(self.survivors_by_depth)]

    @property
    def draft_metrics(self) -> dict[str, float]:
        rate, length = self.draft_acceptance_rate, self.draft_mean_acceptance_length
        if rate is None or length is None:
            return {}
        by_position = {
            f"draft_acceptance_rate_pos_{d}": r for d, r in enumerate(self.draft_acceptance_rate_pos, start=1)
        }
        return {"draft_acceptance_rate": rate, "draft_mean_acceptance_length": length, **by_position}

    @property
    def seconds(self) -> float:
        """Without prefills."""
        return sum(stats.seconds for stats in self.by_strategy.values())

    def add(self, other: EngineStats) -> None:
        for f in fields(self):
            if f.type in ("int", "float"):
                setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        self.survivors_by_depth.update(other.survivors_by_depth)
        self.followed_by_age.update(other.followed_by_age)
        for strategy, stats in other.by_strategy.items():
            self.by_strategy[strategy].add(stats)

    def record_step(self, choice: Choice, outcome: StepOutcome, num_running: int) -> None:
        self.num_steps += 1
        self.num_tokens += outcome.num_tokens
        self.by_strategy[str(choice.strategy)].record(outcome)
        if choice.speed is not None:
            self.predicted_seconds += outcome.seconds
        if choice.otherwise is not None:
            self.won_seconds += outcome.num_tokens / choice.otherwise - outcome.seconds
        self.sequence_seconds += num_running * outcome.seconds

    def record_reference(self, version: int, now: int, num_accepted: int) -> None:
        self.followed_by_age[str(now - version)] += num_accepted

    def record_verifications(
        self, drafted: Sequence[int], accepted: Sequence[int], kept: Sequence[int], depth: int
    ) -> None:
        """By sequence. depth: of the deepest drafted token."""
        self.num_verifications += len(kept)
        self.num_verified_tokens += sum(kept)
        self.num_drafted_tokens += sum(drafted)
        self.num_drafts += sum(num > 0 for num in drafted)
        ended_D = np.bincount(accepted, minlength=depth + 1)
        survived_D = ended_D[::-1].cumsum()[::-1]
        self.survivors_by_depth.update(dict(enumerate(survived_D[1:].tolist(), start=1)))
