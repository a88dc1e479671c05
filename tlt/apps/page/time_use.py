"""How ranks spend a step. Each instant belongs to the innermost span, or to a span in WHOLE; else it is
"other".

    spans of a rank   | prefill | decode | | drafts .... |         | update |
                                              | journal |
    pieces            | prefill | decode |o| d| journal |d| other  | update |   → columns of a picture
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np

from tlt.apps.page.gather import RunRecords, Values
from tlt.base.spans import Span, SpanName
from tlt.training.report.step_record import StepRecord
from tlt.training.report.timeline import SpanRow, timeline_paths

MAX_RANKS = 16
NUM_COLUMNS = 600
"""Columns of a step's picture, each in the color of its longest use."""
NUM_BINS = 200
USES = {
    SpanName.PREFILL: "prefill",
    SpanName.DECODE: "decode",
    SpanName.SPECULATE: "drafts",
    SpanName.AHEAD: "ahead",
    SpanName.TRAIN_DRAFTER: "drafter training",
    SpanName.CHECK_DRAFTER: "drafter training",
    SpanName.WAIT: "waiting",
    SpanName.SCORE: "scores, journal",
    SpanName.JOURNAL: "scores, journal",
    SpanName.CHECKPOINT: "scores, journal",
    SpanName.SPEEDUP: "measuring the speedup",
    SpanName.UPDATE: "update",
    SpanName.PUBLISH: "publish",
}
WHOLE = (SpanName.AHEAD, SpanName.SPEEDUP)
"""Spans that hide the spans inside them."""
OTHER = "other"
USE_NAMES = (*dict.fromkeys(USES.values()), OTHER)
_CLOSE = 4096


@dataclass(frozen=True)
class Piece:
    use: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """Times are seconds since the step's beginning.

    pieces: by rank, in order of time, without gaps.
    engine: engine steps by rank.
    """

    step: int
    seconds: float
    pieces: dict[int, list[Piece]]
    engine: dict[int, list[Span]]

    def seconds_by_use(self) -> dict[str, float]:
        """Mean over ranks."""
        sums = dict.fromkeys(USE_NAMES, 0.0)
        for pieces in self.pieces.values():
            for piece in pieces:
                sums[piece.use] += (piece.end - piece.start) / len(self.pieces)
        return sums

    def columns(self, rank: int) -> list[Piece]:
        edges = np.linspace(0.0, self.seconds, NUM_COLUMNS + 1)
        names = list(dict.fromkeys(piece.use for piece in self.pieces[rank]))
        taken = [
            per_bin(edges, [(p.start, p.end, p.end - p.start) for p in self.pieces[rank] if p.use == use])
            for use in names
        ]
        most = np.argmax(taken, axis=0)
        cuts = [0, *(np.flatnonzero(np.diff(most)) + 1), NUM_COLUMNS]
        return [Piece(names[most[first]], edges[first], edges[last]) for first, last in pairwise(cuts)]

    def curves(self) -> tuple[Values, Values, Values]:
        """(seconds, running responses, tokens per second), of all ranks together."""
        edges = np.linspace(0.0, self.seconds, NUM_BINS + 1)
        width, running, tokens = edges[1] - edges[0], np.zeros(NUM_BINS), np.zeros(NUM_BINS)
        for spans in self.engine.values():
            running += per_bin(edges, [(s.start, s.end, s.num_running * (s.end - s.start)) for s in spans])
            tokens += per_bin(edges, [(s.start, s.end, s.num_tokens) for s in spans])
        return (edges[1:] + edges[:-1]) / 2, running / width, tokens / width


def per_bin(edges: Values, stretches: Sequence[tuple[float, float, float]]) -> Values:
    """Amount in each bin. stretches: (start, end, amount spread evenly), sorted and disjoint."""
    if not stretches:
        return np.zeros(len(edges) - 1)
    times = np.array([(start, end) for start, end, _ in stretches]).ravel()
    sums = np.cumsum([amount for _, _, amount in stretches])
    so_far = np.column_stack([np.concatenate([[0.0], sums[:-1]]), sums]).ravel()
    return np.diff(np.interp(edges, times, so_far))


def read_step(run: RunRecords, record: StepRecord) -> StepTime | None:
    start, end = record.finished_at - record.step_seconds, record.finished_at
    pieces, engine = dict[int, list[Piece]](), dict[int, list[Span]]()
    for rank, path in list(timeline_paths(run.folder).items())[:MAX_RANKS]:
        spans = [_since(start, span) for span in spans_between(path, start, end)]
        if spans:
            pieces[rank] = cut(spans, record.step_seconds)
            engine[rank] = sorted((span for span in spans if span.strategy), key=lambda span: span.start)
    return StepTime(record.step, record.step_seconds, pieces, engine) if pieces else None


def _since(start: float, span: Span) -> Span:
    batch = (span.strategy, span.num_running, span.num_tokens)
    return Span(span.name, span.start - start, span.end - start, *batch)


def cut(spans: Iterable[Span], seconds: float) -> list[Piece]:
    pieces, open_spans = list[Piece](), list[Span]()

    def go_to(time: float) -> None:
        now = pieces[-1].end if pieces else 0.0
        if (time := min(time, seconds)) <= now:
            return
        whole = [span for span in open_spans if span.name in WHOLE]
        use = USES[SpanName((whole or open_spans)[-1].name)] if open_spans else OTHER
        if pieces and pieces[-1].use == use:
            now = pieces.pop().start
        pieces.append(Piece(use, now, time))

    def close(until: float) -> None:
        while open_spans and open_spans[-1].end <= until:
            go_to(open_spans[-1].end)
            open_spans.pop()

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.name in USES:
            close(span.start)
            go_to(span.start)
            open_spans.append(span)
    close(math.inf)
    go_to(seconds)
    return pieces


def spans_between(path: Path, start: float, end: float) -> Iterator[Span]:
    """In Unix seconds. Lines are ordered by the spans' ends."""
    with path.open("rb") as file:
        low, high = 0, path.stat().st_size
        while high - low > _CLOSE:
            middle = (low + high) // 2
            span = next(_spans_from(file, middle), None)
            low, high = (low, middle) if span is None or span.end > start else (middle, high)
        for span in _spans_from(file, low):
            if span.start >= end:
                return
            if span.end > start:
                yield span


def _spans_from(file: IO[bytes], offset: int) -> Iterator[Span]:
    file.seek(offset)
    if offset:
        file.readline()
    for line in file:
        try:
            row = SpanRow.from_json(line)
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        yield row.span
