"""Does a run grow? The resident memory of a rank over many steps of the quickstart's puzzles, with a drafter in training.

    python -m benchmarks.scale.steps --steps 200 --out benchmarks/results/steps-memory

The rank's resident set is read every quarter of a second, and put down to the step that metrics.jsonl has reached. Growth is
the difference between the medians of the last quarter of the steps and of the quarter before the middle; what is kept by design
(the drafter's buffer, the retrieval index) is bounded small, so that it is full by then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tlt.bench.report import environment, number, provenance, table, write_report

LIMIT_MIB = 16.0
KEYS = {
    "run.num_ranks": 1, "run.time_limit_minutes": "none", "run.checkpoint_every": 25, "run.device": "cpu",
    "evaluation.num_problems": 0, "task.num_problems": 256,
    "rollout.problems_per_step": 2, "rollout.samples_per_problem": 4, "sampling.max_tokens": 96,
    "drafter.ngram_tokens": 4000, "drafter.buffer_mib": 8, "rewards.num_workers": 0,
}  # fmt: skip


def resident(pid: int) -> int:
    """Returns the resident KiB of a process; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def family(pid: int) -> list[int]:
    """Returns a process and all below it."""
    try:
        children = [
            int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
        ]
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in family(child))]


def watch(process: subprocess.Popen[bytes], metrics: Path) -> dict[int, list[int]]:
    """Returns, by steps done, the resident KiB of the largest process."""
    samples: dict[int, list[int]] = {}
    while process.poll() is None:
        done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        samples.setdefault(done, []).append(max(map(resident, family(process.pid))))
        time.sleep(0.25)
    return samples


def measure(steps: int, config: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        keys = {**KEYS, "run.out_dir": folder, "run.num_steps": steps}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "tlt", "train", config, *words]
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
            samples = watch(process, folder / "metrics.jsonl")
        if process.returncode:
            sys.exit(f"exit code {process.returncode}")
        preempted = sum(json.loads(line)["num_preemptions"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    by_step = {step: max(values) / 1024 for step, values in sorted(samples.items()) if 0 < step < steps}
    early = [mib for step, mib in by_step.items() if steps // 4 <= step < steps // 2]
    late = [mib for step, mib in by_step.items() if 3 * steps // 4 <= step]
    growth = statistics.median(late) - statistics.median(early)
    return {"steps": steps, "early_mib": statistics.median(early), "late_mib": statistics.median(late), "growth_mib": growth,
            "preemptions": preempted, "by_step": by_step}  # fmt: skip


def to_markdown(report: dict[str, Any]) -> str:
    run = report["run"]
    quarter, half, late = run["steps"] // 4, run["steps"] // 2, 3 * run["steps"] // 4
    rows = [[f"{quarter} to {half}", number(run["early_mib"], ".1f")], [f"{late} on", number(run["late_mib"], ".1f")]]
    growth = f"Growth: {run['growth_mib']:.1f} MiB over {half} steps."
    parts = ["# Resident memory over many steps", *provenance(report), table(["steps", "median, MiB"], rows), growth]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--config", default="countdown", help="a configuration, or the name of a recipe")
    parser.add_argument("--out", type=Path, required=True, help="results go to OUT.json and OUT.md")
    options = parser.parse_args()
    command = f"python -m benchmarks.scale.steps --steps {options.steps} --config {options.config} --out {options.out}"
    report: dict[str, Any] = {"command": command, "environment": environment(), "run": measure(options.steps, options.config)}
    write_report(options.out, report, to_markdown(report))
    print(json.dumps({key: value for key, value in report["run"].items() if key != "by_step"}))
    if report["run"]["growth_mib"] > LIMIT_MIB:
        sys.exit(f"the rank has grown by more than {LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
