"""The long tail of one step, without TLT and with it: running responses over the seconds of its rollout.

    python -m benchmarks.train recipes/countdown/headline.toml --out FOLDER/bench --variants tlt --run.out_dir FOLDER
    python -m benchmarks.running FOLDER

The step is the one whose rollouts' ratio is the median of the measured steps. Read from timelines; drawn by
`python -m tools.docs_pictures running`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser
from benchmarks.report import markdown, table, write_report
from tlt.apps.page.gather import RunRecords, read_run
from tlt.apps.page.time_use import Piece, read_step
from tlt.base.spans import Span
from tlt.base.types import UserError
from tlt.training.report.step_record import StepRecord

RUNS = ("off", "tlt")
IDLE = {"drafter training": "trains", "waiting": "waits"}
"""What a rank does without a response, by the page's uses; with one it generates."""


def running(spans_by_rank: Sequence[Sequence[Span]]) -> list[tuple[float, int]]:
    """Returns (seconds, running responses of all ranks) wherever the number changes. spans_by_rank: spans of
    engine steps, in order of time."""
    changes = list[tuple[float, int]]()
    for spans in spans_by_rank:
        now = 0
        for start, num in [*((span.start, span.num_running) for span in spans), (spans[-1].end, 0)]:
            changes.append((start, num - now))
            now = num
    curve, total = dict[float, int](), 0
    for start, change in sorted(changes):
        total += change
        if change:
            curve[round(start, 3)] = total
    return [*curve.items()]


def uses(pieces: Sequence[Piece], end: float) -> list[tuple[str, float, float]]:
    """Returns what a rank did until `end`: (use, from, to), neighbours of one use as one."""
    named = [
        (IDLE.get(p.use, "generates"), float(p.start), float(min(p.end, end)))
        for p in pieces
        if p.start < end
    ]
    stretches = (list(group) for _, group in groupby(named, key=lambda piece: piece[0]))
    return [(group[0][0], round(group[0][1], 3), round(group[-1][2], 3)) for group in stretches]


def rollout_of(run: RunRecords, record: StepRecord) -> dict[str, Any]:
    """Returns a step's rollout as the picture needs it: it ends with the last token."""
    step = read_step(run, record)
    if step is None or not all(step.engine.values()):
        raise UserError(f"{run.folder}: its timeline has no engine steps of step {record.step}")
    end = max(spans[-1].end for spans in step.engine.values())
    ranks = [uses(step.columns(rank), end) for rank in step.pieces]
    return {"seconds": round(end, 3), "running": running([*step.engine.values()]), "ranks": ranks}


def read_rollouts(folder: Path) -> dict[str, Any]:
    """Returns the median step of the runs that took turns in `folder`, its rollout in each run.

    Raises UserError where responses differ between the runs: then they would be no measure of speed.
    """
    turns = [json.loads(line) for line in (folder / "turns.jsonl").read_text("utf-8").splitlines()]
    if wrong := [turn["step"] for turn in turns if turn["run"] in RUNS and turn["num_different"]]:
        raise UserError(f"{folder}: responses differ in step {wrong[0]}; measure in float64, or other seeds")
    runs = [read_run(folder / name, name) for name in RUNS]
    pairs = sorted(
        zip(*(run.steps for run in runs), strict=True),
        key=lambda p: p[0].rollout.seconds / p[1].rollout.seconds,
    )
    chosen = pairs[len(pairs) // 2]
    rollouts = {run.name: rollout_of(run, record) for run, record in zip(runs, chosen, strict=True)}
    return {
        "step": chosen[0].step,
        "num_steps": len(pairs),
        "num_responses": chosen[0].rollout.num_responses,
        "num_tokens": chosen[0].rollout.num_tokens,
        "rollouts": rollouts,
    }


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    amounts = (
        f"{report['num_responses']} responses of {report['num_tokens']:,} tokens, the same in both runs."
    )
    line = f"Step {report['step']}, whose ratio is the median of {report['num_steps']} steps: {amounts}"
    rows = []
    for name, found in report["rollouts"].items():
        curve, quarter = found["running"], report["num_responses"] // 4
        until = next(end for (_, num), (end, _) in [*pairwise(curve)][::-1] if num > quarter)
        trained = sum(end - start for rank in found["ranks"] for use, start, end in rank if use == "trains")
        rows.append([name, f"{found['seconds']:.2f}", f"{until:.2f}", f"{trained:.2f}"])
    columns = ["run", "last token, s", "more than a quarter run until, s", "drafter training, rank-seconds"]
    return markdown("The long tail of one step", report, line, table(columns, rows))


def main() -> int:
    parser = make_parser("running", __doc__, "benchmarks/results/running")
    parser.add_argument("folder", type=Path, help="run.out_dir of benchmarks.train; its report: FOLDER/bench")
    options = parser.parse_args()

    def work() -> None:
        bench = json.loads((options.folder / "bench.json").read_text("utf-8"))
        command = f"{bench['command']} && {command_of(parser)}".replace(str(options.folder), "FOLDER")
        report = {"command": command, "environment": bench["environment"], **read_rollouts(options.folder)}
        write_report(options.out, report, to_markdown(report))

    return carry_out("running", work)


if __name__ == "__main__":
    sys.exit(main())
