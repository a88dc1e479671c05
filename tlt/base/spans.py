"""Spans: stretches of a rank's time, by what it was spent on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SpanName(StrEnum):
    """The names of spans, in a table's order. Steps and evaluations contain other spans; `preempt` lies
    within `train drafter`, and tells how late that ended."""

    STEP = "step"
    PREFILL = "prefill"
    DECODE = "decode"
    SPECULATE = "speculate"
    AHEAD = "ahead"
    TRAIN_DRAFTER = "train drafter"
    PREEMPT = "preempt"
    SCORE = "score"
    JOURNAL = "journal"
    WAIT = "wait"
    SPEEDUP = "speedup"
    CHECK_DRAFTER = "check drafter"
    UPDATE = "update"
    PUBLISH = "publish"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Span:
    """A stretch of time on one rank; seconds on that process's monotonic clock. Engine steps also tell:

    strategy: of their drafts, as text; empty: this is no engine step.
    num_running: sequences in the batch.
    num_tokens: tokens committed.
    """

    name: str
    start: float
    end: float
    strategy: str = ""
    num_running: int = 0
    num_tokens: int = 0
