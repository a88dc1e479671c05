"""Has this tree lost something? Six cheap figures, held against those of earlier commits in benchmarks/history.jsonl.

    python -m benchmarks.gate               all six, four minutes: `make evidence-gate`; exit code 1 for one outside its band
    python -m benchmarks.gate --clockless   the four that no clock decides, 15 seconds: a test runs them
    python -m benchmarks.gate --accept      a figure outside its band is the level from now on

    equal     share of responses that a chain of drafts leaves as they are without: all of them
    accept    tokens a verification of that chain
    gap       mean |engine's log-probability - trainer's|
    work      calls of Python and C functions in an engine step without speculation: what the host does
    off       tokens/s without speculation, over rounds/s of a fixed loop of PyTorch in the same process, in turns
    speedup   seconds of a quickstart rollout without speculation over seconds with it, in turns

A band is around the median of the last five lines of the figure on this machine (for those without a clock: with this
Python and PyTorch). Where there is none, nothing is judged. What a clock decides waits for a quiet machine: beside others'
work `off` moves by a fifth, and two trees in turns tell more (paired.py). Figures within their bands are appended, a line a
figure and commit; those of a tree with changes are not.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from time import process_time
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import carry_out, make_parser
from benchmarks.evidence import wait_for_quiet
from benchmarks.report import environment
from benchmarks.rollout import trace
from benchmarks.subject import Subject
from benchmarks.turns import in_turns
from tlt.base.config.load import load_config
from tlt.base.io.files import dumps, write_atomically
from tlt.base.types import Rollout
from tlt.training.build.policy import build_policy, policy_on_meta
from tlt.training.update.logprobs import response_logprobs
from tlt.training.update.micro_batches import Experience

HISTORY = Path(__file__).with_name("history.jsonl")
CHAIN = "4x1x4"


@dataclass(frozen=True)
class Band:
    """The least and the largest value; relative: times the median of earlier ones. is_clocked: the machine decides."""

    low: float = -math.inf
    high: float = math.inf
    relative: bool = True
    is_clocked: bool = False


BANDS = {
    "equal": Band(low=1.0, relative=False),
    "accept": Band(0.97, 1.03),
    "gap": Band(high=1e-5, relative=False),
    "work": Band(high=1.03),
    "off": Band(low=0.94, is_clocked=True),
    "speedup": Band(low=0.8, is_clocked=True),
}


@dataclass(frozen=True)
class Line:
    """A line of history.jsonl: a figure at a commit. machine: what has to be the same for a comparison."""

    figure: str
    value: float
    commit: str
    date: str
    machine: str


def read_history(path: Path = HISTORY) -> list[Line]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Line(**json.loads(line)) for line in text.splitlines()]


def limits(line: Line, history: Sequence[Line]) -> tuple[float, float] | None:
    """Returns the least and the largest value that a figure may have; None: nothing to compare with."""
    band = BANDS[line.figure]
    if not band.relative:
        return band.low, band.high
    same = [one.value for one in history if (one.figure, one.machine) == (line.figure, line.machine)]
    if not same:
        return None
    level = statistics.median(same[-5:])
    return band.low * level, band.high * level


def is_within(line: Line, history: Sequence[Line]) -> bool:
    found = limits(line, history)
    return found is None or found[0] <= line.value <= found[1]


def describe(line: Line, history: Sequence[Line]) -> str:
    found = limits(line, history)
    band = "no earlier figure on this machine"
    if found is not None:
        sides = zip(("at least", "at most"), found, strict=True)
        band = ", ".join(f"{side} {limit:.4g}" for side, limit in sides if math.isfinite(limit))
    verdict = "new " if found is None else "ok  " if is_within(line, history) else "FAIL"
    return f"{verdict} {line.figure:8} {line.value:.5g}   {band}"


def appended(history: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """Returns the history with these lines, in place of those of the same figure, commit and machine."""
    keys = {(line.figure, line.commit, line.machine) for line in lines}
    return [one for one in history if (one.figure, one.commit, one.machine) not in keys] + [*lines]


# ── without a clock ──────────────────────────────────────────────────────────────────────────────────────────


def subject_of(max_tokens: int) -> Subject:
    return Subject(load_config("countdown", ["--sampling.max_tokens", str(max_tokens)]))


def clockless() -> dict[str, float]:
    """Returns the figures that follow from the seed and the code."""
    subject = subject_of(max_tokens=96)
    requests = subject.requests(0, 12)
    off, _ = trace(subject.engine("off", 12), requests)
    drafted, traced = trace(subject.engine(CHAIN, 12), requests)
    assert traced.accept_length is not None, "a chain was verified"
    equal = [a.token_ids == b.token_ids for a, b in zip(off, drafted, strict=True)]
    return {
        "equal": statistics.mean(equal),
        "accept": traced.accept_length,
        "gap": mean_gap(subject, off[:4]),
        "work": calls_of_a_step(subject),
    }


def mean_gap(subject: Subject, rollouts: Sequence[Rollout]) -> float:
    """Returns the mean distance of the engine's log-probabilities from those of the trainer, which reads the responses at
    once."""
    config, model = subject.config, subject.model
    policy = build_policy(policy_on_meta(config, model.config), model, torch.device("cpu"), config.run.seed)
    gaps: list[float] = []
    for rollout in rollouts:
        with torch.no_grad():
            batch = [Experience(rollout, (0.0,) * len(rollout.token_ids), needs_grad=False)]
            logprobs_T, _ = response_logprobs(policy, batch, config.sampling.temperature)
        gaps += [abs(a - b) for a, b in zip(logprobs_T.tolist(), rollout.logprobs, strict=True)]
    return statistics.mean(gaps)


def calls_of_a_step(subject: Subject, num_steps: int = 24) -> float:
    """Returns the calls of Python and C functions of an engine step, 8 running responses, without speculation."""
    engine = subject.engine("off", 8)
    engine.add(subject.requests(1, 8))
    for _ in range(4):  # the prompts, and what happens once
        engine.step()
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    sys.setprofile(note)
    try:
        for _ in range(num_steps):
            engine.step()
    finally:
        sys.setprofile(None)
    engine.close()
    return (calls["call"] + calls["c_call"]) / num_steps


# ── with a clock ─────────────────────────────────────────────────────────────────────────────────────────────


def fixed_loop() -> Callable[[], object]:
    """Returns products of 8 rows with matrices of the model's size in all, which leave the nearest caches."""
    weights = [torch.full((256, 256), 1 / 256) for _ in range(60)]

    def run() -> Tensor:
        rows = torch.ones(8, 256)
        for _ in range(20):
            for weight in weights:
                rows = rows @ weight
        return rows

    return run


def off_over_loop(num_rounds: int = 400) -> float:
    """Returns processor seconds of the fixed loop over those of 8 responses of 16 tokens without speculation: the median of
    short turns that do the same work, so that what slows the machine hits both."""
    subject = subject_of(max_tokens=16)
    engine, requests = subject.engine("off", 8), subject.requests(0, 8)

    def seconds(work: Callable[[], object]) -> float:
        start = process_time()
        work()
        return process_time() - start

    tasks = {"off": partial(seconds, lambda: trace(engine, requests)), "loop": partial(seconds, fixed_loop())}
    in_turns(tasks, 5)  # what a fresh process is slow at
    found = in_turns(tasks, num_rounds)
    engine.close()
    return statistics.median(a / b for a, b in zip(found["loop"], found["off"], strict=True))


def rollout_speedup(num_rounds: int = 8) -> float:
    """Returns the speedup of a rollout of 32 of the quickstart's responses, with tuners that know nothing."""
    subject = subject_of(max_tokens=512)
    requests = subject.requests(0, 32)

    def seconds(variant: str) -> float:
        return trace(subject.engine(variant, 32), requests)[1].seconds

    seconds("adaptive")  # what a fresh process is slow at
    found = in_turns({name: partial(seconds, name) for name in ("off", "adaptive")}, num_rounds)
    return statistics.median(a / b for a, b in zip(found["off"], found["adaptive"], strict=True))


def software_here() -> str:
    """Returns what figures without a clock depend on."""
    about = environment()
    return f"Python {about['python']}, torch {about['torch']}"


def measure(has_clock: bool) -> list[Line]:
    """Returns the figures of this tree."""
    about, software = environment(), software_here()
    values = clockless() | ({"off": off_over_loop(), "speedup": rollout_speedup()} if has_clock else {})
    return [
        Line(
            figure,
            value,
            about["commit"],
            date.today().isoformat(),
            f"{about['cpu']}; {software}" if BANDS[figure].is_clocked else software,
        )
        for figure, value in values.items()
    ]


def main() -> int:
    parser = make_parser("gate", __doc__, needs_out=False)
    parser.add_argument("--clockless", action="store_true", help="only what no clock decides")
    parser.add_argument(
        "--busy", action="store_true", help="does not wait for a quiet machine, nor keep what a clock decides"
    )
    parser.add_argument("--accept", action="store_true", help="appends figures outside their bands, too")
    options = parser.parse_args()
    history = read_history()
    if not options.clockless and not options.busy:
        wait_for_quiet(patience_minutes=10)
    lines = measure(not options.clockless)
    print("\n".join(describe(line, history) for line in lines))
    good = [line for line in lines if is_within(line, history)]
    kept = lines if options.accept else good
    told = [line for line in kept if not (options.busy and BANDS[line.figure].is_clocked)]
    if "changes" not in lines[0].commit:
        with write_atomically(HISTORY) as file:
            file.writelines(dumps(asdict(line)) + "\n" for line in appended(history, told))
    return 0 if len(kept) == len(lines) else 1


if __name__ == "__main__":
    sys.exit(carry_out("gate", main))
