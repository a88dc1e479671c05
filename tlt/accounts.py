"""What ranks give account of: their engine steps, how idle time was spent, and the drafter at a step's end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True)
class TimedStep:
    """An engine step without admissions, on the host's monotonic clock. strategy: its name.  num_running: sequences in it."""

    strategy: str
    num_running: int
    start: float
    end: float

    def shifted(self, seconds: float) -> TimedStep:
        """Returns the same on another clock, which is so much ahead."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)


class IdleUse(StrEnum):
    """Names what a rank without work does: it generates later steps' responses, trains the drafter, or rests."""

    AHEAD = "ahead"
    TRAIN = "train"
    REST = "rest"


@dataclass(frozen=True)
class IdleStretch:
    """A stretch of idle time in one use, on the host's monotonic clock."""

    use: IdleUse
    start: float
    end: float


@dataclass(frozen=True)
class DrafterReport:
    """The account of drafter training: of one micro-step, one session or several.

    num_tokens: tokens trained on.  captured_tokens: those of them whose features the engine had captured.
    recomputed_tokens: tokens that went through the target again for their features.
    loss: mean over the tokens trained on.
    max_micro_step_seconds: bounds how long a preemption can take.
    preempted_at: when the latest session returned because it was asked to (the host's monotonic clock); None: it was not.
    is_limited: a session ended because its data had been gone through drafter.max_passes times; idle time was left.
    """

    num_micro_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    max_micro_step_seconds: float = 0.0
    captured_tokens: int = 0
    recomputed_tokens: int = 0
    preempted_at: float | None = None
    is_limited: bool = False

    def plus(self, later: DrafterReport) -> DrafterReport:
        """Returns both reports as one."""
        trained = [report for report in (self, later) if report.num_tokens]
        num_tokens = self.num_tokens + later.num_tokens
        return DrafterReport(
            num_micro_steps=self.num_micro_steps + later.num_micro_steps,
            num_tokens=num_tokens,
            seconds=self.seconds + later.seconds,
            loss=sum(r.loss * r.num_tokens for r in trained) / num_tokens if trained else float("nan"),
            max_micro_step_seconds=max(self.max_micro_step_seconds, later.max_micro_step_seconds),
            captured_tokens=self.captured_tokens + later.captured_tokens,
            recomputed_tokens=self.recomputed_tokens + later.recomputed_tokens,
            preempted_at=later.preempted_at,
            is_limited=self.is_limited or later.is_limited,
        )


@dataclass(frozen=True)
class DrafterCheck:
    """The state of the learned drafter at the end of a step.

    version: counts its publications.  acceptance: mean over response tokens of sum_v min(p, q), the most that one draft can be
    accepted with; NaN: not measured.  retrieval: share of the same tokens that retrieval would have drafted.
    before: the acceptance of the drafter that was in service before this step's training; NaN: not measured.
    publish_seconds: in which what was trained was averaged over the ranks, given to the engines, and seen to have arrived; of
        the slowest rank.
    training: "trained", "trained; max_passes reached", "no idle time", "off", or "undone: …" with the reason.
    vocabulary: tokens that it could propose in the step; 0: not known.  coverage: the part of the step's tokens among them.
    """

    version: int
    acceptance: float
    retrieval: float
    training: str
    before: float = math.nan
    publish_seconds: float = 0.0
    vocabulary: int = 0
    coverage: float = math.nan

    @property
    def is_undone(self) -> bool:
        return self.training.startswith("undone: ")


@dataclass(frozen=True)
class AheadReport:
    """The account of one session of generating ahead, or of several: engine steps, tokens, and seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, later: AheadReport) -> AheadReport:
        """Returns both as one."""
        steps, tokens = self.num_steps + later.num_steps, self.num_tokens + later.num_tokens
        return AheadReport(steps, tokens, self.seconds + later.seconds)
