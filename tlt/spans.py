"""Spans: what a rank's time was spent on. Knows neither who measures them nor who draws them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SpanName(StrEnum):
    """Names what a rank's time is recorded under, in the order in which a table shows it. Steps and
    evaluations hold others; `preempt` says how late drafter training ended, which lies within it."""

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
    CHECK_DRAFTER = "check drafter"
    UPDATE = "update"
    PUBLISH = "publish"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Span:
    """A stretch of time on one rank; seconds on that process's monotonic clock."""

    name: str
    start: float
    end: float
