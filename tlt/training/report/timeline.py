"""The timeline: each rank's time as spans, drawn as a Chrome trace (chrome://tracing, ui.perfetto.dev).

    rank 0   | step ......................................................... |
             | prefill | decode | speculate                | update           |
    rank 1   | prefill | decode | train drafter ........... | update           |

A rank's file has Unix seconds of rank 0's clock: ranks and resumed runs share one axis. No fault of reading
or writing ends the run.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tlt.base.clock import machine_name
from tlt.base.io.files import Record, check_is_file, write_atomically
from tlt.base.spans import Span
from tlt.base.types import UserError

MERGE_GAP_SECONDS = 0.001
"""Successive spans of one name merge within this gap; engine steps only at equal strategy and batch size."""

MOST = 1 << 53
"""Bound of the counts in a row."""
_EPOCH_ROUNDS = 7
"""Exchanges that compare clocks between machines."""
_NAME = re.compile(r"timeline\.rank(\d+)\.jsonl", re.ASCII)
_LONGEST_LINE = 1 << 16
"""Bytes of the longest line that is read."""


@dataclass(frozen=True)
class Epoch:
    """to_rank_0: seconds to rank 0's monotonic clock; exactly 0 on the same machine.
    to_unix: seconds to rank 0's Unix time.
    """

    to_rank_0: float = 0.0
    to_unix: float = 0.0
    machine: str = ""


@dataclass(slots=True)
class SpanRow:
    """A line of a rank's file: one or several merged spans. busy_seconds: without the gaps between them."""

    name: str
    start: float
    end: float
    busy_seconds: float
    num_spans: int
    strategy: str = ""
    num_running: int = 0
    num_tokens: int = 0

    @staticmethod
    def of(span: Span) -> SpanRow:
        batch = span.strategy, span.num_running, span.num_tokens
        return SpanRow(span.name, span.start, span.end, span.end - span.start, 1, *batch)

    @property
    def span(self) -> Span:
        return Span(self.name, self.start, self.end, self.strategy, self.num_running, self.num_tokens)

    def merge(self, span: Span) -> bool:
        is_alike = self.name == span.name and self.strategy == span.strategy
        is_near = 0.0 <= span.start - self.end <= MERGE_GAP_SECONDS
        if not (is_alike and is_near and self.num_running == span.num_running):
            return False
        self.end = span.end
        self.busy_seconds += span.end - span.start
        self.num_spans += 1
        self.num_tokens += span.num_tokens
        return True

    def to_json(self, epoch: float) -> str:
        """epoch: added to both times. Only engine steps have a batch."""
        times = self.start + epoch, self.end + epoch
        batch = (self.strategy, self.num_running, self.num_tokens) if self.strategy else ()
        return json.dumps([self.name, *times, self.busy_seconds, self.num_spans, *batch])

    @staticmethod
    def from_json(line: str | bytes) -> SpanRow:
        """Raises ValueError, TypeError, OverflowError or RecursionError."""
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        name, start, end, busy, count, *batch = json.loads(text)
        seconds = float(start), float(end), float(busy)
        if not all(map(math.isfinite, seconds)):
            raise ValueError("a time is not finite")
        strategy, num_running, num_tokens = batch or ("", 0, 0)
        if not all(0 <= number < MOST for number in (count, num_running, num_tokens)):
            raise ValueError("a count is negative or too large")
        return SpanRow(str(name), *seconds, int(count), str(strategy), int(num_running), int(num_tokens))


class Timeline:
    """path: `flush` appends to it; None: nothing is written.
    epoch: from `shared_epoch`; default: the clock itself is the axis.
    clock: monotonic seconds.
    say: gets one line if the file cannot be written; nothing is from then on.
    """

    def __init__(
        self,
        rank: int,
        path: str | Path | None = None,
        epoch: Epoch = Epoch(),
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.rank, self.epoch = rank, epoch
        self._path = None if path is None else Path(path)
        self.clock, self._say = clock, say
        self._is_lost = False
        self._rows: list[SpanRow] = []  # on this rank's clock
        if self._path is not None:
            with self._writing(self._path) as path:
                path.parent.mkdir(parents=True, exist_ok=True)
                _end_torn_line(path)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[Path]:
        try:
            yield path
        except OSError as error:
            self._is_lost = True
            lacks = "timeline.json will lack what this rank does now"
            self._say(f"{path}: cannot be written ({error.strerror}); {lacks}")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Costs about 1 µs. Spans may nest."""
        start = self.clock()
        try:
            yield
        finally:
            self.record(name, start, self.clock())

    def record(self, name: str, start: float, end: float) -> None:
        self.add(Span(name, start, end))

    def add(self, span: Span) -> None:
        """A span measured elsewhere on this rank's clock."""
        if not (self._rows and self._rows[-1].merge(span)):
            self._rows.append(SpanRow.of(span))

    @property
    def spans(self) -> list[Span]:
        return [row.span for row in self._rows]

    def flush(self) -> None:
        """Once a step. Without a file, spans stay until `clear`."""
        if self._path is None or not self._rows:
            return
        lines = [row.to_json(self.epoch.to_unix) for row in self._rows]
        self.clear()
        if not self._is_lost:
            with self._writing(self._path) as path, path.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))

    def clear(self) -> None:
        self._rows = []


def shared_epoch(rank: int, gather: Callable[[Any], list[Any]]) -> Epoch:
    """Compares this rank's clock with rank 0's: exact on one machine, between machines the median over
    rounds. Every rank calls it.

    gather: a barrier that returns all ranks' values.
    """
    machine = machine_name() or f"rank {rank}"
    gather(None)
    rounds = [gather((machine, time.perf_counter(), time.time())) for _ in range(_EPOCH_ROUNDS)]
    machine_0, clock_0, wall_0 = rounds[0][0]
    to_rank_0 = 0.0
    if rounds[0][rank][0] != machine_0:
        differences = sorted(values[0][1] - values[rank][1] for values in rounds[1:])
        to_rank_0 = differences[len(differences) // 2]
    return Epoch(to_rank_0, float(wall_0 - clock_0 + to_rank_0), machine)


# -- files ---------------------------------------------------------------------------------------------------


def rank_path(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"timeline.rank{rank}.jsonl"


def merge_timelines(directory: str | Path, out: str | Path) -> list[str]:
    """Returns a line about each fault."""
    missing: list[str] = []
    try:
        with write_atomically(Path(out)) as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(json.dumps({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "TLT"}}))
            for rank, path in timeline_paths(Path(directory)).items():
                rows, lacks = _read_rows(path)
                missing += [f"{path}: {why}; {out} lacks {what}" for why, what in lacks.items()]
                file.writelines(f",\n{json.dumps(event)}" for event in _events(rank, rows))
            file.write("\n]}\n")
    except (UserError, OSError) as error:
        missing.append(f"{error}; there is no picture of the run's time")
    return missing


def _events(rank: int, rows: Sequence[SpanRow]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
    for row in sorted(rows, key=lambda row: (row.start, -row.end)):  # nested spans come after the outer one
        args: Record = {}
        if row.num_spans > 1:
            args = {"spans": row.num_spans, "busy_ms": round(row.busy_seconds * 1e3, 3)}
        if row.strategy:
            args |= {"strategy": row.strategy, "running": row.num_running, "tokens": row.num_tokens}
        yield {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "name": row.name,
            "ts": round(row.start * 1e6, 1),
            "dur": round((row.end - row.start) * 1e6, 1),
            **({"args": args} if args else {}),
        }


def _read_rows(path: Path) -> tuple[list[SpanRow], dict[str, str]]:
    """Returns (sound rows, what is missing by reason)."""
    rows: list[SpanRow] = []
    num_bad = 0
    try:
        check_is_file(path)
        with path.open("rb") as file:
            for line in iter(partial(file.readline, _LONGEST_LINE), b""):
                try:
                    row = SpanRow.from_json(line)
                except (ValueError, TypeError, OverflowError, RecursionError):
                    num_bad += line.endswith(b"\n")  # a line read in several pieces counts once
                else:
                    rows += [row] if line.endswith(b"\n") else []
    except OSError as error:
        return rows, {f"cannot be read ({error.strerror})": "what this rank did"}
    return rows, {f"{num_bad} of its {num_bad + len(rows)} lines are no spans": "them"} if num_bad else {}


def timeline_paths(directory: Path) -> dict[int, Path]:
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("timeline.rank*.jsonl"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _end_torn_line(path: Path) -> None:
    """Drops a last line torn by a kill; a line over _LONGEST_LINE is ended instead."""
    if not path.exists():
        return
    check_is_file(path)
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(end - _LONGEST_LINE, 0))
        newline = file.read().rfind(b"\n")
        if start and newline < 0:
            file.write(b"\n")
        else:
            file.truncate(start + newline + 1)
