"""A competitor's end of its pipe: reads a line with work, answers with a line of measurements.

Imports only Python's own modules: the environments of vLLM and llama.cpp have nothing else in common.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Job = dict[str, Any]
"""The settings of a process: see `Plan.job` in competitors.py."""


@dataclass(frozen=True)
class Work:
    """One batch of responses, all present from the start."""

    way: str
    """How the process generates them."""
    prompts: list[tuple[str, list[int]]]
    """Names and token ids."""
    lengths: list[int]
    """Tokens of each response."""
    temperature: float
    index: int
    """Of the round, from which the random numbers follow."""


@dataclass(frozen=True)
class Took:
    """The measurements of a batch."""

    seconds: float
    first_seconds: float
    """Until every response had its first token, so all prompts were read."""
    cpu_seconds: float
    num_tokens: int
    num_responses: int
    accept_length: float | None = None
    """Tokens per verification, the target's own included; None: nothing was drafted."""
    token_hash: str | None = None
    """Of all tokens, where these follow our law; None: they do not."""


class Watch:
    """Measures a batch."""

    def __init__(self) -> None:
        self.cpu, self.begun, self.first = time.process_time(), time.perf_counter(), 0.0

    def step(self, has_begun: Callable[[], bool] = lambda: True) -> None:
        """Notes the end of a step. has_begun: returns whether every response has a token now."""
        if not self.first and has_begun():
            self.first = time.perf_counter() - self.begun

    def took(self, num_tokens: int, num_responses: int, accept_length: float | None = None) -> Took:
        seconds, cpu_seconds = time.perf_counter() - self.begun, time.process_time() - self.cpu
        return Took(seconds, self.first, cpu_seconds, num_tokens, num_responses, accept_length)


def serve(prepare: Callable[[Job], tuple[Callable[[Work], Took], dict[str, str]]]) -> None:
    """Answers until the pipe is closed. All other output goes to stderr.

    prepare: loads the job's model; returns the function that measures, and versions.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measure, versions = prepare(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        print(json.dumps(asdict(measure(Work(**json.loads(line))))), file=answers)
