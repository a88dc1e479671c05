"""Stretches of a rank's time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SpanName(StrEnum):
    """Steps and evaluations contain other spans; `preempt` lies within `train drafter`, and tells how late
    that ended."""

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
    """Seconds on the rank's monotonic clock. strategy: as text; empty: no engine step."""

    name: str
    start: float
    end: float
    strategy: str = ""
    num_running: int = 0
    num_tokens: int = 0
