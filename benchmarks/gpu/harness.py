"""Runs the parts of a measurement one after the other, each in a process of its own with a time limit of its
own.

    part ─▶ python -m benchmarks.gpu.MODULE '{"out": …, …}' ─▶ ok │ failed │ timed out │ skipped: a line of the report
              └─ writes its record whenever it has something new: what was measured before a time-out stays

What a part leaves of its time goes to the later ones; no part goes on beyond the end of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tlt.base.io.files import dumps, write_atomically

LAST_CHARACTERS = 4000
"""Of what a part has printed that are kept."""


@dataclass(frozen=True)
class Part:
    """One part. module: run by `python -m`.
    seconds: its share of the time.
    settings: what it is given, as JSON.
    variables: of its environment, beside those that are there."""

    name: str
    module: str
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a part. status: ok, failed, timed out, skipped (it said why itself), or no time left.
    seconds: it took.
    record: what it wrote, perhaps not to the end; None: nothing.
    output: the last that it printed."""

    name: str
    status: str
    seconds: float
    limit: float
    record: Mapping[str, Any] | None
    output: str


def run_parts(
    parts: Sequence[Part], seconds: float, note: Callable[[Sequence[Outcome]], None]
) -> list[Outcome]:
    """Runs all parts within so many seconds. note: is told all outcomes so far, after each part."""
    began, granted = time.monotonic(), 0.0
    outcomes: list[Outcome] = []
    for part in parts:
        passed = time.monotonic() - began
        granted += part.seconds
        limit = min(max(granted - passed, 0.0), seconds - passed)
        outcomes.append(
            run_part(part, limit) if limit > 0 else Outcome(part.name, "no time left", 0.0, 0.0, None, "")
        )
        note(outcomes)
    return outcomes


def run_part(part: Part, limit: float) -> Outcome:
    """Runs one part, and ends it with all that it has started when its time is over."""
    with tempfile.TemporaryDirectory(prefix="tlt-gpu-") as folder:
        written, printed = Path(folder) / "record.json", Path(folder) / "output"
        argument = json.dumps({**part.settings, "out": str(written)})
        began = time.monotonic()
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", part.module, argument],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": folder, **part.variables},
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        seconds = time.monotonic() - began
        record = json.loads(written.read_text()) if written.exists() else None
        status = _status(code, record)
        return Outcome(part.name, status, seconds, limit, record, _last_of(printed))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part and its children: the process group is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(code: int | None, record: Mapping[str, Any] | None) -> str:
    if code is None:
        return "timed out"
    if code:
        return "failed"
    return "skipped" if record is not None and "skipped" in record else "ok"


def _last_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[-LAST_CHARACTERS:]


class Record:
    """What a part writes: a JSON object, written anew whenever something is added."""

    def __init__(self, argument: str) -> None:
        self.settings: dict[str, Any] = json.loads(argument)
        self.values: dict[str, Any] = {}

    @staticmethod
    def of_arguments() -> Record:
        """Returns that of the process that `run_part` has started."""
        return Record(sys.argv[1])

    def add(self, **values: Any) -> None:
        self.values |= values
        with write_atomically(Path(self.settings["out"])) as file:
            file.write(dumps(self.values) + "\n")

    def append(self, key: str, value: Any) -> None:
        self.add(**{key: [*self.values.get(key, []), value]})

    def skip(self, why: str) -> None:
        """Ends the process: the part has nothing to measure here."""
        self.add(skipped=why)
        raise SystemExit(0)


# ── seconds on a device ─────────────────────────────────────────────────────────────────────────────────────


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    call: Callable[[], object], device: torch.device, num_calls: int = 10, num_rounds: int = 3
) -> float:
    """Returns the seconds of one call: the median of rounds of `num_calls`, after two that warm up."""
    call()
    call()
    rounds = []
    for _ in range(num_rounds):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait_for(device)
        rounds.append((time.perf_counter() - began) / num_calls)
    return statistics.median(rounds)
