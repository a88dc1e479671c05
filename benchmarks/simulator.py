"""The simulator of the phase beside real steps of two ranks, and its tables for more replicas.

    real     tlt train recipes/countdown/headline.toml, with responses kept: TLT, then TLT with ahead 1
    same     the simulator on the very lengths, with costs, acceptance and the rest of a step as each run measured them
    tables   by replicas: with what the first run measured, and for a GPU-like cost curve

    python -m benchmarks.simulator --replicas 2,8,64 --out benchmarks/results/simulator     about 6 minutes on two quiet cores
    python -m benchmarks.simulator --runs FOLDER --out …                          the same from runs that are there

Off has no tuner that measures its steps, and TLT hardly makes any: it is left out, but for the GPU-like curve.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.bench.report import environment, provenance, table, write_report
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.simulate.assumptions import GENERAL, Assumptions, LogNormalLengths, RecordedLengths
from tlt.simulate.expectation import TLT, Row, expect, simulate
from tlt.simulate.gpu import GpuSeconds, assume_gpu, with_rest
from tlt.simulate.recorded import RecordedRun, assume_recorded, read_run
from tlt.simulate.rollout import Variant
from tlt.training.problems import load_problems, problems_of_step
from tlt.types import UserError

RECIPE = Path("recipes/countdown/headline.toml")


@dataclass(frozen=True)
class Real:
    """A real run: its options, the variant that simulates it, and the steps that count, the first being a fresh process'."""

    options: tuple[str, ...]
    variant: Variant
    num_steps: int


RUNS = {
    "tlt": Real((), TLT, 7),
    "ahead": Real(("--rollout.ahead", "1"), Variant("+ ahead 1", trains=True, ahead=1), 7),
}


def record_run(folder: Path, real: Real, num_steps: int) -> None:
    """Trains for some steps, the responses kept; no evaluation, which measures nothing here."""
    amounts = ("--run.num_steps", str(num_steps), "--evaluation.num_problems", "0", "--run.keep_responses", "true")
    words = [sys.executable, "-m", "tlt", "train", str(RECIPE), *amounts, *real.options, "--run.out_dir", str(folder)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words[3:])}: exit code {done.returncode}\n{done.stderr}")


def lengths_in_order(run: RecordedRun) -> RecordedLengths:
    """Returns a run's lengths with a step's problems in the order of its queue."""
    problems, rollout = load_problems(run.config, "train"), run.config.rollout
    steps = []
    for step, lengths in enumerate(run.lengths):
        order = problems_of_step(problems, step, rollout.problems_per_step, run.config.run.seed)
        steps.append([lengths[problem.problem_id] for problem in order])
    return RecordedLengths(steps)


def beside(name: str, run: RecordedRun) -> list[dict[str, float]]:
    """Returns every step of a run but the first, measured and simulated."""
    assumed = assume_recorded(run, run.config)
    other = [step.step_seconds - step.rollout_seconds for step in run.steps]
    assumed = dataclasses.replace(assumed, lengths=lengths_in_order(run), other_seconds=other)
    num_problems, steps = run.config.rollout.problems_per_step, range(1, len(run.steps))
    found = simulate(assumed, RUNS[name].variant, run.config.run.num_ranks, num_problems, steps)
    return [
        {
            "step": real.step,
            "real": real.step_seconds,
            "simulated": one.seconds,
            "real_rollout": real.rollout_seconds,
            "simulated_rollout": one.rollout_seconds,
            "real_idle": real.idle_seconds,
            "simulated_idle": one.idle_seconds,
            "tokens": real.num_tokens,
            "simulated_tokens": one.num_tokens,
        }
        for real, one in zip(run.steps[1:], found, strict=True)
    ]


def errors(steps: list[dict[str, float]]) -> dict[str, float]:
    """Returns the relative errors of simulated steps: of the median step, and of their sum, of whole steps and of rollouts."""
    found = {}
    for kind in ("", "_rollout"):
        pairs = [(step[f"simulated{kind}"], step[f"real{kind}"]) for step in steps]
        found[f"median{kind}"] = statistics.median(abs(simulated / real - 1) for simulated, real in pairs)
        found[f"sum{kind}"] = sum(simulated for simulated, _ in pairs) / sum(real for _, real in pairs) - 1
    return found


Table = tuple[Assumptions, Config, tuple[int, ...], bool]
"""What it rests on, whose recipe it is, for which numbers of replicas, and whether its steps grow with them."""


def row_of(table: Table, num: int) -> Row:
    """Returns the row for so many replicas. Where steps do not grow, theirs is always that of the first."""
    assumed, config, nums, grows = table
    each = config.rollout.problems_per_step / config.run.num_ranks
    return expect(assumed, num, max(round(each * (num if grows else nums[0])), 1))


def gpu_tables(replicas: tuple[int, ...]) -> dict[str, Table]:
    """Returns tables for the GPU-like curve: of steps that grow with the replicas, and of one step that more and more share."""
    config = load_config(RECIPE, ["--sampling.max_tokens", "8192"])
    lengths = LogNormalLengths(1024, 8192, 8192)
    assumed = with_rest(assume_gpu(config, GpuSeconds(0.025, 512), lengths), 36.0)
    large = load_config(RECIPE, ["--sampling.max_tokens", "8192", "--rollout.problems_per_step", "64"])
    shared = dataclasses.replace(assumed, max_batch_size=256)
    return {
        "GPU-like, 16 responses a replica": (assumed, config, replicas, True),
        "GPU-like, 256 responses a step": (shared, large, (2, 4, 8, 16), False),
    }


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    parts = ["# The simulator beside real steps of two ranks", *provenance(report)]
    took = f"{report['seconds']:.0f} s in all, of which {report['simulation_seconds']:.0f} s simulating."
    parts.append(f"{took} Errors are simulated / real - 1.")
    columns = ["run", "steps", "median error, steps", "error of their sum", "median error, rollouts", "error of their sum"]
    kinds = ("median", "sum", "median_rollout", "sum_rollout")
    rows = [[n, len(one["steps"]), *(f"{one['errors'][kind]:+.1%}" for kind in kinds)] for n, one in report["beside"].items()]
    parts.append(table(columns, rows))
    for name, one in report["beside"].items():
        shown = [
            [f"{step['step']:.0f}", f"{step['tokens']:,}", *_pair(step, ""), *_pair(step, "_rollout")] for step in one["steps"]
        ]
        parts += [f"## {name}", table(["step", "tokens", "real, s", "simulated, s", "rollout real", "simulated"], shown)]
    for name, one in report["tables"].items():
        names = [variant["variant"] for variant in one["rows"][0]["variants"]]
        shown = [[row["num_replicas"], row["num_responses"], *map(_cell, row["variants"]), _idle(row)] for row in one["rows"]]
        parts += [f"## {name}", table(["replicas", "responses", *names, "TLT: idle, trained in it"], shown)]
        parts.append("\n".join(f"- {line}" for line in one["assumed"]))
    return "\n\n".join(parts) + "\n"


def _pair(step: dict[str, float], kind: str) -> list[str]:
    return [f"{step[f'real{kind}']:.2f}", f"{step[f'simulated{kind}']:.2f}"]


def _cell(one: dict[str, Any]) -> str:
    return f"{one['seconds']:.1f} s, {one['times_first']:.2f}"


def _idle(row: dict[str, Any]) -> str:
    tlt = next(one for one in row["variants"] if one["variant"] == TLT.name)
    return f"{tlt['idle_seconds'] / row['num_replicas'] / tlt['rollout_seconds']:.0%}, {tlt['trained_share']:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="for the real runs, which have fewer steps where there are fewer"
    )
    parser.add_argument("--runs", type=Path, help="folder with runs that are there: tlt, and ahead if any")
    parser.add_argument("--replicas", default="2,8,64", help="of the tables")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulator"))
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        if options.runs is None:
            for name, real in RUNS.items():
                record_run(folder / name, real, max(round(real.num_steps * min(options.minutes / 6, 1)), 2))
        runs = {name: folder / name for name in RUNS if (folder / name).is_dir()}
        begun = time.perf_counter()
        for report in reports(runs, tuple(map(int, options.replicas.split(",")))):  # an interrupted one keeps what it has
            report["simulation_seconds"], report["seconds"] = time.perf_counter() - begun, time.perf_counter() - started
            write_report(options.out, report, to_markdown(report))
    for name, one in report["beside"].items():
        print(f"{name}: median error of a step {one['errors']['median']:.1%}, of all together {one['errors']['sum']:+.1%}")


def reports(folders: dict[str, Path], replicas: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields the report on these runs, and again after each table."""
    tlt = read_run(folders["tlt"])
    command = " ".join(["python -m benchmarks.simulator", *sys.argv[1:]])
    report: dict[str, Any] = {"command": command, "environment": environment(), "beside": {}, "tables": {}}
    for name, folder in folders.items():
        run = read_run(folder)
        steps = beside(name, run)
        report["beside"][name] = {"steps": steps, "errors": errors(steps)}
    yield report
    recorded = dataclasses.replace(assume_recorded(tlt, tlt.config), lengths=lengths_in_order(tlt))
    tables = {"As the run of TLT measured": (recorded, tlt.config, replicas, True), **gpu_tables(replicas)}
    for name, one in tables.items():
        report["tables"][name] = {"assumed": [*one[0].lines, *GENERAL], "rows": []}
        for num in one[2]:
            report["tables"][name]["rows"].append(dataclasses.asdict(row_of(one, num)))
            yield report


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"simulator: error: {error}")
