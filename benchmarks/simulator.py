"""The simulator of the phase beside real steps of two ranks, and its tables for more replicas.

    real     tlt train recipes/countdown/headline.toml, with responses kept: TLT, then TLT with ahead 1
    same     the simulator on the very lengths, with costs, acceptance and the rest of a step as each run measured them
    tables   by replicas: with what the first run measured, and for a GPU-like cost curve; the paper's, by nodes

    python -m benchmarks.simulator --out benchmarks/results/simulator             about 15 minutes on two quiet cores
    python -m benchmarks.simulator --runs FOLDER --out …                          the same from runs that are there
    python -m benchmarks.simulator --earlier FILE --out …                         what comes of runs stays as in this report

Off has no tuner that measures its steps, and TLT hardly makes any: it is left out, but for the GPU-like curve.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from tlt.build.model import all_ranks
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.simulate.assumptions import GENERAL, Assumptions, LogNormalLengths, RecordedLengths
from tlt.simulate.expectation import OFF, TLT, Row, expect, simulate
from tlt.simulate.gpu import GpuSeconds, assume_gpu, with_rest
from tlt.simulate.recorded import RecordedRun, assume_recorded, read_run
from tlt.simulate.rollout import Variant
from tlt.training.problems import load_problems, problems_of_step
from tlt.types import UserError

RECIPE = Path("recipes/countdown/headline.toml")
AS_MEASURED = "As the run of TLT measured"
PAPER = {"Qwen2.5-7B": {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}, "Qwen2.5-32B": {4: 1.83, 8: 2.12}}
"""Model → 8-GPU nodes → end to end over VeRL (arXiv 2511.16665, as third parties quote it)."""
PAPER_STEPS = {"Qwen2.5-7B": (2, 0.012), "Qwen2.5-32B": (4, 0.020)}
"""Model → GPUs of a replica, seconds of a plain step: assumed, but for the 4 of the 32B (the paper measured its drafts so)."""
PAPER_RESPONSES, PAPER_SAMPLES, PAPER_MEDIAN, PAPER_CAP = 512, 16, 2048, 16_384
"""A step's responses, those to one problem, the median and the cap of their tokens: assumed."""
PAPER_ROLLOUT_SHARE = 0.85
"""Of a step without speculation at the largest number of nodes; the rest is divided among the nodes."""


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
    found = simulate(assumed, RUNS[name].variant, len(run.ranks), num_problems, steps)
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
    each = config.rollout.problems_per_step / all_ranks(config)
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


def paper_rows() -> Iterator[dict[str, Any]]:
    """Yields what the paper reports for a model and a number of nodes, and what is simulated for it: a step is the same
    whatever the number, and so is the work outside of its rollout."""
    for model, reported in PAPER.items():
        gpus, seconds = PAPER_STEPS[model]
        amounts = {"sampling.max_tokens": PAPER_CAP, "rollout.samples_per_problem": PAPER_SAMPLES}
        config = load_config(RECIPE, {**amounts, "rollout.max_batch_size": PAPER_RESPONSES})
        lengths = LogNormalLengths(PAPER_MEDIAN, PAPER_CAP, PAPER_CAP)
        assumed = dataclasses.replace(assume_gpu(config, GpuSeconds(seconds, 512), lengths), per_host=8 // gpus)
        steps, num_problems = range(1, 2), PAPER_RESPONSES // PAPER_SAMPLES
        found = {
            nodes: [simulate(assumed, one, 8 * nodes // gpus, num_problems, steps)[0] for one in (OFF, TLT)]
            for nodes in reported
        }
        most = max(reported)
        rest = found[most][0].rollout_seconds * (1 / PAPER_ROLLOUT_SHARE - 1) * most
        for nodes, (off, tlt) in found.items():
            yield {
                "model": model,
                "nodes": nodes,
                "replicas": 8 * nodes // gpus,
                "paper": reported[nodes],
                "off_seconds": off.rollout_seconds + rest / nodes,
                "tlt_seconds": tlt.rollout_seconds + rest / nodes,
                "rollout_times": off.rollout_seconds / tlt.rollout_seconds,
                "times": (off.rollout_seconds + rest / nodes) / (tlt.rollout_seconds + rest / nodes),
            }


def paper_lines() -> list[str]:
    """Returns what the paper's table is simulated with, for people."""
    models = "; ".join(
        f"{name}: {gpus} GPUs a replica, {1000 * s:g} ms a plain step" for name, (gpus, s) in PAPER_STEPS.items()
    )
    return [
        f"a step has {PAPER_RESPONSES} responses, {PAPER_SAMPLES} to a problem, half of them above {PAPER_MEDIAN:,} tokens, one"
        f" in twenty at {PAPER_CAP:,} (cut): assumed; the paper's own lengths and batch are not known here",
        f"{models}: assumed; up to 512 tokens in a forward cost the same",
        f"outside of the rollout {1 - PAPER_ROLLOUT_SHARE:.0%} of a step without speculation at the most nodes, and in"
        " proportion to one over the nodes: assumed",
        "costs and acceptance of drafts: those of the paper's 32B, for both models, whatever the batch",
        "off is this engine without speculation and with the same queue; the paper compares with VeRL, whose rollout also"
        " decodes above 32 requests without CUDA graphs",
        "nothing was fitted to the paper's column",
    ]


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    parts = ["# The simulator beside real steps of two ranks", *provenance(report)]
    took = f"{report['seconds']:.0f} s in all, of which {report['simulation_seconds']:.0f} s simulating."
    parts.append(f"{took} Errors are simulated / real - 1.")
    if "runs_of" in report:
        parts.append(f"The steps beside real ones and the table of what the run measured are of commit {report['runs_of']}.")
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
        if one["rows"] and "worth" in one["rows"][0]["variants"][-1]:
            parts += [
                "Worth of idle time, seconds by which steps become shorter for each that an idle replica spends:",
                _worth(one),
            ]
        parts.append("\n".join(f"- {line}" for line in one["assumed"]))
    if report.get("paper"):
        columns = [
            "model",
            "nodes",
            "replicas",
            "paper, over VeRL",
            "simulated, over off",
            "simulated / paper - 1",
            "rollout alone",
        ]
        parts += ["## The paper's table by nodes", table(columns, [_paper_cells(row) for row in report["paper"]])]
        parts.append("\n".join(f"- {line}" for line in paper_lines()))
    return "\n\n".join(parts) + "\n"


def _paper_cells(row: dict[str, Any]) -> list[Any]:
    off_by = f"{row['times'] / row['paper'] - 1:+.0%}"
    return [
        row["model"],
        row["nodes"],
        row["replicas"],
        row["paper"],
        f"{row['times']:.2f}",
        off_by,
        f"{row['rollout_times']:.2f}",
    ]


def _worth(one: dict[str, Any]) -> str:
    worth = {row["num_replicas"]: row["variants"][-1]["worth"] for row in one["rows"]}
    uses = sorted({use for values in worth.values() for use in values})
    return table(["replicas", *uses], [[num, *(f"{values[use]:.4f}" for use in uses)] for num, values in worth.items()])


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
    parser.add_argument("--earlier", type=Path, help="report (.json) whose figures of real runs are taken over")
    parser.add_argument("--replicas", default="2,8,64,512", help="of the tables")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulator"))
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        if options.runs is None and options.earlier is None:
            for name, real in RUNS.items():
                record_run(folder / name, real, max(round(real.num_steps * min(options.minutes / 6, 1)), 2))
        runs = {name: folder / name for name in RUNS if (folder / name).is_dir()}
        begun = time.perf_counter()
        replicas = tuple(map(int, options.replicas.split(",")))
        for report in reports(runs, options.earlier, replicas):  # an interrupted one keeps what it has
            report["simulation_seconds"], report["seconds"] = time.perf_counter() - begun, time.perf_counter() - started
            write_report(options.out, report, to_markdown(report))
    for name, one in report["beside"].items():
        print(f"{name}: median error of a step {one['errors']['median']:.1%}, of all together {one['errors']['sum']:+.1%}")


def reports(folders: dict[str, Path], earlier: Path | None, replicas: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields the report on these runs, or on those of an earlier report, and again after each row."""
    command = " ".join(["python -m benchmarks.simulator", *sys.argv[1:]])
    report: dict[str, Any] = {"command": command, "environment": environment(), "beside": {}, "tables": {}}
    tables = gpu_tables(replicas)
    if earlier is not None:
        before = json.loads(earlier.read_text())
        report |= {"beside": before["beside"], "runs_of": before.get("runs_of", before["environment"]["commit"])}
        report["tables"][AS_MEASURED] = before["tables"][AS_MEASURED]
    else:
        for name, folder in folders.items():
            steps = beside(name, read_run(folder))
            report["beside"][name] = {"steps": steps, "errors": errors(steps)}
        tlt = read_run(folders["tlt"])
        recorded = dataclasses.replace(assume_recorded(tlt, tlt.config), lengths=lengths_in_order(tlt))
        tables = {AS_MEASURED: (recorded, tlt.config, replicas, True), **tables}
    yield report
    for name, one in tables.items():
        report["tables"][name] = {"assumed": [*one[0].lines, *GENERAL], "rows": []}
        for num in one[2]:
            report["tables"][name]["rows"].append(dataclasses.asdict(row_of(one, num)))
            yield report
    report["paper"] = []
    for row in paper_rows():
        report["paper"].append(row)
        yield report


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"simulator: error: {error}")
