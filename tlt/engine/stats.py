"""The counts of an engine: tokens, verifications, seconds, each strategy's share of them. Knows no engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields

from tlt.types import StepOutcome


@dataclass
class StrategyStats:
    """Counts what a strategy brought and cost. `predicted_tokens` is what the tuner expected in those of these seconds for
    which it made a prediction (`predicted_seconds`)."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    predicted_tokens: float = 0.0
    predicted_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def predicted_speed(self) -> float | None:
        """Tokens per second expected; None where nothing was predicted."""
        return self.predicted_tokens / self.predicted_seconds if self.predicted_seconds else None

    def record(self, outcome: StepOutcome, predicted_speed: float | None) -> None:
        self.num_steps += 1
        self.num_tokens += outcome.num_tokens
        self.seconds += outcome.seconds
        if predicted_speed is not None:
            self.predicted_tokens += predicted_speed * outcome.seconds
            self.predicted_seconds += outcome.seconds

    def add(self, other: StrategyStats) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class EngineStats:
    """Counts since the engine was made, or since it was replaced by a new one."""

    num_tokens: int = 0
    num_verifications: int = 0
    num_verified_tokens: int = 0
    num_steps: int = 0
    prefill_seconds: float = 0.0
    by_strategy: dict[str, StrategyStats] = field(default_factory=lambda: defaultdict(StrategyStats))
    survivors_by_depth: Counter[int] = field(default_factory=Counter)
    attempts_by_depth: Counter[int] = field(default_factory=Counter)

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verification, the bonus token included; None when nothing was speculated."""
        return self.num_verified_tokens / self.num_verifications if self.num_verifications else None

    @property
    def accept_by_depth(self) -> list[float]:
        """Share of verifications whose walk survived to depth 1, 2, ... (of those that drafted so deep)."""
        return [self.survivors_by_depth[d] / self.attempts_by_depth[d] for d in sorted(self.attempts_by_depth)]

    def draft_metrics(self) -> dict[str, float]:
        """Returns the acceptance by the names that trainers log (SkyRL's, of vLLM's counters); {} where nothing was drafted.

        draft_acceptance_rate: accepted of the drafted depths.  draft_mean_acceptance_length: `accept_length`.
        draft_acceptance_rate_pos_K: `accept_by_depth`, K counted from 1.
        """
        if self.accept_length is None or not self.attempts_by_depth:
            return {}
        rate = self.survivors_by_depth.total() / self.attempts_by_depth.total()
        by_depth = {f"draft_acceptance_rate_pos_{d}": share for d, share in enumerate(self.accept_by_depth, start=1)}
        return {"draft_acceptance_rate": rate, "draft_mean_acceptance_length": self.accept_length, **by_depth}

    def add(self, other: EngineStats) -> None:
        """Counts of another engine or phase on top of these."""
        for name in ("num_tokens", "num_verifications", "num_verified_tokens", "num_steps", "prefill_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.survivors_by_depth.update(other.survivors_by_depth)
        self.attempts_by_depth.update(other.attempts_by_depth)
        for strategy, stats in other.by_strategy.items():
            self.by_strategy[strategy].add(stats)

    def record_verification(self, depth: int, num_accepted: int, num_kept: int) -> None:
        self.num_verifications += 1
        self.num_verified_tokens += num_kept
        for d in range(1, depth + 1):
            self.attempts_by_depth[d] += 1
            if num_accepted >= d:
                self.survivors_by_depth[d] += 1
