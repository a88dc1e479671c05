"""What checkpoints and the journal cost a run, by the spans of its own timeline: the share of a step's seconds that a rank
spends on them.

    python -m benchmarks.faults.cost --out benchmarks/results/cost [--config countdown] [--steps 12]

The run saves after every step, so a step holds one checkpoint: copying on all ranks, and waiting for the writers of the one
before where they are not done. "every 10" is the default's share, a tenth of it. The journal's share is of every step. What the
writers' threads do beside the run takes cores from it, too: see the processor's seconds of a step with checkpoints and journal
and without, of runs in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tlt.bench.report import environment, provenance, table, write_report
from tlt.report.timeline import read_spans
from tlt.spans import SpanName


def run(config: str, folder: Path, num_steps: int, every: int) -> dict[str, Any]:
    """Trains and returns the seconds of its steps and checkpoints, by rank, those of a step's journal, and the processor's
    seconds of a step. every: steps between checkpoints; 0: neither checkpoints nor journal."""
    amounts = {
        "run.out_dir": folder, "run.num_steps": num_steps, "run.checkpoint_every": every, "run.time_limit_minutes": "none",
        "evaluation.num_problems": 0, "run.journal": json.dumps(bool(every)),
    }  # fmt: skip
    words = [word for key, value in amounts.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "tlt", "train", config, *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"checkpoint_every {every}: exit code {done.returncode}\n{done.stderr}")
    ranks = []
    for spans in read_spans(folder).values():
        steps = [span for span in spans if span.name == SpanName.STEP]
        saved = [span.end - span.start for span in spans if span.name == SpanName.CHECKPOINT and span.start < steps[-1].start]
        journal = [span for span in spans if span.name == SpanName.JOURNAL]
        written = [sum(one.end - one.start for one in journal if step.start <= one.start <= step.end) for step in steps]
        ranks.append({"steps": [span.end - span.start for span in steps], "checkpoints": saved, "journal": written})
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    size = sum(file.stat().st_size for file in max((folder / "checkpoints").glob("step-*")).iterdir())
    return {"every": every, "ranks": ranks, "cpu_seconds": [record["cpu_seconds"] for record in records], "bytes": size}


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over steps, of the slowest rank, and the share of a step that they are."""
    saving = [run for run in runs if run["every"]]
    step = statistics.median(seconds for run in saving for seconds in run["ranks"][0]["steps"])
    waited = max(
        statistics.median(seconds for run in saving for seconds in run["ranks"][rank]["checkpoints"])
        for rank in range(len(saving[0]["ranks"]))
    )
    journal = max(
        statistics.median(seconds for run in saving for seconds in run["ranks"][rank]["journal"])
        for rank in range(len(saving[0]["ranks"]))
    )
    worst = max(seconds for run in saving for rank in run["ranks"] for seconds in rank["checkpoints"])
    cpu = {every: statistics.median(s for run in runs if run["every"] == every for s in run["cpu_seconds"]) for every in (0, 1)}
    return {
        "step_seconds": step,
        "checkpoint_ms": 1e3 * waited,
        "longest_checkpoint_ms": 1e3 * worst,
        "checkpoint_share_if_every_step": waited / step,
        "checkpoint_share_if_every_10_steps": waited / step / 10,
        "journal_ms": 1e3 * journal,
        "journal_share": journal / step,
        "cpu_seconds_a_step": {"without": cpu[0], "with": cpu[1]},
        "megabytes": saving[0]["bytes"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="countdown")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="without its ending: .json and .md are written")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(arguments.rounds):
            for every in (1, 0) if number % 2 else (0, 1):
                runs.append(run(arguments.config, Path(place) / f"{number}-{every}", arguments.steps, every))
    command = f"python -m benchmarks.faults.cost --config {arguments.config} --steps {arguments.steps}"
    summary = summarize(runs)
    report = {"command": command, "environment": environment(), "summary": summary, "runs": runs}
    rows = [[key, f"{value:.3g}" if isinstance(value, float) else json.dumps(value)] for key, value in summary.items()]
    text = ["# What checkpoints and the journal cost", *provenance(report), table(["", ""], rows)]
    write_report(arguments.out, report, "\n\n".join(text) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
