"""The end of the pipe in a competitor's process: a line with work comes in, a line with what it took goes
out. Imports nothing that is not Python's own: the environments that vLLM and llama.cpp live in have
nothing else in common."""

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
"""What a process is started with: see `Plan.job` in competitors.py."""


@dataclass(frozen=True)
class Work:
    """One batch, all of it there from the start: every response gets `num_tokens` tokens.

    way: how, of the ways that the process knows.
    prompts: names and token ids.
    index: of the round; no two are alike.
    """

    way: str
    prompts: list[tuple[str, list[int]]]
    num_tokens: int
    temperature: float
    index: int


@dataclass(frozen=True)
class Took:
    """What a batch took.

    first_seconds: until every response had its first token: all prompts were read.
    accept_length: tokens of a verification, the target's own included; None: nothing was drafted.
    token_hash: of all tokens, where these follow our law; None: they are drawn otherwise.
    """

    seconds: float
    first_seconds: float
    cpu_seconds: float
    num_tokens: int
    num_responses: int
    accept_length: float | None = None
    token_hash: str | None = None


class Watch:
    """Takes the times of a batch."""

    def __init__(self) -> None:
        self.cpu, self.begun, self.first = time.process_time(), time.perf_counter(), 0.0

    def step(self, has_begun: Callable[[], bool] = lambda: True) -> None:
        """Notes that a step is over. has_begun: says whether every response has a token now."""
        if not self.first and has_begun():
            self.first = time.perf_counter() - self.begun

    def took(self, num_tokens: int, num_responses: int, accept_length: float | None = None) -> Took:
        seconds, cpu_seconds = time.perf_counter() - self.begun, time.process_time() - self.cpu
        return Took(seconds, self.first, cpu_seconds, num_tokens, num_responses, accept_length)


def serve(prepare: Callable[[Job], tuple[Callable[[Work], Took], dict[str, str]]]) -> None:
    """Answers until the pipe is closed. prepare: loads what the job says; returns what measures, and the
    versions of what runs. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measure, versions = prepare(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        print(json.dumps(asdict(measure(Work(**json.loads(line))))), file=answers)
