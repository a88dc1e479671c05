"""Reports the turns of train.py, from their files: ratios of step seconds, phases, differences."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.report import markdown, number, ratio_text, table
from tlt.base.io.files import read_appended
from tlt.base.spans import Span, SpanName
from tlt.base.types import UserError
from tlt.training.report.ratio import Ratio
from tlt.training.report.step_record import StepRecord, read_metrics
from tlt.training.report.timeline import SpanRow, timeline_paths

GENERATION = frozenset({SpanName.PREFILL, SpanName.DECODE, SpanName.SPECULATE})
DRAFTER_TRAINING = frozenset({SpanName.TRAIN_DRAFTER, SpanName.CHECK_DRAFTER})
"""Training itself, and the averaging, publishing and measuring at its end."""


@dataclass(frozen=True)
class Turn:
    """One step of one run: a line of turns.jsonl, beside the run's own metrics."""

    run: str
    step: int
    seconds: float
    """From the start of all ranks to the end of all, the record written."""
    num_different: int
    """Responses whose tokens or reward are not the reference's."""
    same_weights: bool
    """Whether the weights after the step are the reference's, bit for bit."""
    digest: str
    """Hash of all token ids and rewards."""


def ceiling(rollout_share: float, rollout_speedup: float) -> float:
    """Returns the highest speedup of a step whose rollout alone gets faster (Amdahl): 1 / (1 - r + r / S).

    rollout_share: r, the rollout's share of the reference's step.
    rollout_speedup: S, of the rollout alone.
    """
    return 1 / (1 - rollout_share + rollout_share / rollout_speedup)


def read_turns(path: Path, names: Iterable[str]) -> dict[str, list[Turn]]:
    """Returns the turns by run; none where there is no file. Raises UserError for a run that is not named."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in read_appended(path, lambda line: Turn(**json.loads(line)), "turn"):
        if turn.run not in turns:
            found = f"{path.parent} holds a run {turn.run!r}"
            raise UserError(f"run.out_dir: {found}; include it, or give another --run.out_dir")
        turns[turn.run].append(turn)
    return turns


def phase_seconds(spans_by_rank: Mapping[int, Sequence[Span]]) -> dict[str, float]:
    """Returns the seconds per step under each span's name, mean over ranks; `other`: covered by no span.

    Time that several spans cover (preempted training) counts under each of their names.
    """
    seconds: dict[str, float] = defaultdict(float)
    num_steps = 0
    for spans in spans_by_rank.values():
        for step in (span for span in spans if span.name == SpanName.STEP):
            num_steps += 1
            within = [
                s for s in spans if s.name != SpanName.STEP and step.start <= s.start and s.end <= step.end
            ]
            for span in within:
                seconds[span.name] += span.end - span.start
            covered = covered_seconds(within, {span.name for span in within}, step.start, step.end)
            seconds["other"] += step.end - step.start - covered
    return {name: value / num_steps for name, value in seconds.items()}


def summarize_runs(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Summarizes the runs in `folder` over the rounds that all of them finished. The first name is the
    reference.

    In the result, `ratios` are step seconds of base / run for every run and base; `rollout_speedup` S and the
    ceiling are over the reference. Raises UserError where no round was finished.
    """
    turns = read_turns(folder / "turns.jsonl", names)
    reference, *others = names
    num_steps = len(turns[reference])
    if num_steps == 0:
        raise UserError("bench: not one round was finished; give it more --minutes")
    records = {name: read_metrics(folder / name / "metrics.jsonl")[:num_steps] for name in names}
    runs = {name: summarize_run(records[name], turns[name], read_spans(folder / name)) for name in names}
    share = runs[reference]["rollout_share"]
    for name in others:
        speedup = Ratio.between(
            [r.rollout.seconds for r in records[reference]], [r.rollout.seconds for r in records[name]]
        )
        runs[name] |= {
            "rollout_speedup": dataclasses.asdict(speedup),
            "ceiling": ceiling(share, speedup.mean),
            "ratios": {
                base: dataclasses.asdict(
                    Ratio.between([t.seconds for t in turns[base]], [t.seconds for t in turns[name]])
                )
                for base in names
                if base != name
            },
        }
    return {"num_steps": num_steps, "runs": runs}


def summarize_run(
    records: Sequence[StepRecord], turns: Sequence[Turn], spans: Mapping[int, Sequence[Span]]
) -> dict[str, Any]:
    """Summarizes one run. Seconds are per step, idle seconds summed over ranks; None: nothing to measure."""
    num_steps = len(turns)
    step_seconds = sum(turn.seconds for turn in turns)
    idle_seconds = sum(record.idle.seconds for record in records)
    train_seconds = sum(record.drafter.train_seconds for record in records)
    turns_of = [record.rollout.turns for record in records]
    phases = phase_seconds(spans)
    phases["record"] = (step_seconds - sum(record.step_seconds for record in records)) / num_steps
    return {
        "step_seconds": step_seconds / num_steps,
        "phase_seconds": phases,
        "rollout_share": sum(record.rollout.seconds for record in records) / step_seconds,
        "cpu_seconds": sum(record.cpu_seconds for record in records) / num_steps,
        "reward_mean": statistics.mean(record.rewards.mean for record in records),
        "num_responses": sum(record.rollout.num_responses for record in records),
        "num_tokens": sum(record.rollout.num_tokens for record in records),
        "accept_length": mean_of(record.rollout.accept_length for record in records),
        "turns_per_response": mean_of(turn.per_response for turn in turns_of),
        "first_acceptance_length": mean_of(turn.first_acceptance_length for turn in turns_of),
        "later_acceptance_length": mean_of(turn.later_acceptance_length for turn in turns_of),
        "wait_seconds": sum(turn.wait_seconds for turn in turns_of) / num_steps,
        "idle_seconds": idle_seconds / num_steps,
        "harvested_share": train_seconds / idle_seconds if idle_seconds else None,
        "ahead_share": sum(r.idle.ahead_seconds for r in records) / idle_seconds if idle_seconds else None,
        "drafter_training_on_critical_path": critical_path_share(spans),
        "num_different": sum(turn.num_different for turn in turns),
        "num_steps_with_same_weights": sum(turn.same_weights for turn in turns),
        "steps": [
            {"seconds": turn.seconds, "rollout_seconds": record.rollout.seconds, "digest": turn.digest}
            for record, turn in zip(records, turns, strict=True)
        ],
    }


def mean_of(values: Iterable[float]) -> float | None:
    """Returns the mean of those that are no NaN; None: there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.mean(known) if known else None


def train_markdown(title: str, report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown: the runs side by side, the reference first."""
    runs: dict[str, Any] = report["runs"]
    reference, *others = runs
    off, config = runs[reference], report["config"]

    def values(title: str, key: str, form: str = ".2f") -> list[str]:
        return [title, *(number(run.get(key), form) for run in runs.values())]

    def ratios(title: str, ratio_of: Iterable[Mapping[str, Any] | None]) -> list[str]:
        return [title, *("–" if ratio is None else ratio_text(ratio) for ratio in ratio_of)]

    rows = [
        values("step, s", "step_seconds"),
        *(
            ratios(f"step time, {base} / run", (run.get("ratios", {}).get(base) for run in runs.values()))
            for base in (reference, *others[1:])
        ),
        ratios(f"rollout time, {reference} / run (S)", (run.get("rollout_speedup") for run in runs.values())),
        values(f"ceiling 1 / (1 - r + r / S), r = {off['rollout_share']:.1%}", "ceiling"),
        values("accept length", "accept_length"),
        values("CPU-seconds per step", "cpu_seconds"),
        values("mean reward", "reward_mean", ".4f"),
        values("idle rank-seconds per step", "idle_seconds"),
        values("of these, drafter training", "harvested_share", ".1%"),
        values("of these, lookahead", "ahead_share", ".1%"),
        values("drafter training on the critical path (spans)", "drafter_training_on_critical_path", ".2%"),
        values(f"responses that differ from {reference}'s, of {off['num_responses']}", "num_different", "d"),
        values(f"steps that end with {reference}'s very weights", "num_steps_with_same_weights", "d"),
    ]
    if off["turns_per_response"] > 1:
        rows += [
            values("turns per response", "turns_per_response"),
            values("tokens per verification that drafted, first turns", "first_acceptance_length"),
            values("the same, later turns", "later_acceptance_length"),
            values("seconds that responses waited for tools, per step", "wait_seconds"),
        ]
    names = [
        n for n in (*SpanName, "record", "other") if any(n in run["phase_seconds"] for run in runs.values())
    ]
    phases = [
        [name, *(number(run["phase_seconds"].get(name), ".3f") for run in runs.values())] for name in names
    ]
    num_steps, run = report["num_steps"], config["run"]
    described = (
        f"{num_steps} steps of {off['num_responses'] // num_steps} responses"
        f" ({off['num_tokens'] / off['num_responses']:.0f} tokens on average), {run['num_ranks']} ranks,"
        f" {run['dtype']}. The runs took their steps in turns; ratios are geometric means of paired steps"
        " with 95 % intervals, above 1: faster. In float32 a near-tie may fall the other way; the run then"
        " got the reference's weights before the next step."
    )
    blocks = [
        table(["", *runs], rows),
        "## Seconds per step, mean over ranks",
        table(["phase", *runs], phases),
    ]
    return markdown(title, report, described, *blocks)


def read_spans(folder: Path) -> dict[int, list[Span]]:
    """Returns spans by rank, in Unix seconds of rank 0. Raises UserError for a damaged file."""
    return {
        rank: [row.span for row in read_appended(path, SpanRow.from_json, "span")]
        for rank, path in timeline_paths(folder).items()
    }


def critical_path_share(spans_by_rank: Mapping[int, Sequence[Span]]) -> float:
    """The share of the steps' seconds that drafter training adds to the critical path.

    A step adds the seconds of `DRAFTER_TRAINING` after its last response's end, on the rank that spends
    most; earlier training runs beside generation. Not counted: a response handed to a training rank waits
    for a micro-step.
    """
    all_spans = list(chain(*spans_by_rank.values()))
    all_steps = ([span for span in spans if span.name == SpanName.STEP] for spans in spans_by_rank.values())
    steps = next((steps for steps in all_steps if steps), [])
    evaluations = [span for span in all_spans if span.name == SpanName.EVALUATE]
    generation = [s for s in all_spans if s.name in GENERATION and not _lies_in(s, evaluations)]
    added = 0.0
    for step in steps:
        ends = [span.end for span in generation if step.start <= span.start < step.end]
        if ends:
            added += max(
                covered_seconds(spans, DRAFTER_TRAINING, max(ends), step.end)
                for spans in spans_by_rank.values()
            )
    total = sum(step.end - step.start for step in steps)
    return added / total if total > 0 else float("nan")


def _lies_in(span: Span, others: Sequence[Span]) -> bool:
    return any(other.start <= span.start and span.end <= other.end for other in others)


def covered_seconds(spans: Sequence[Span], names: Collection[str], start: float, end: float) -> float:
    """Nested spans count once."""
    pieces = sorted((max(span.start, start), min(span.end, end)) for span in spans if span.name in names)
    covered, reached = 0.0, start
    for piece_start, piece_end in pieces:
        if piece_end > max(piece_start, reached):
            covered += piece_end - max(piece_start, reached)
            reached = piece_end
    return covered
