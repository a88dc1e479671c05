"""Holds the arithmetic of `tlt plan speed` to real steps of two ranks, and to the paper's table by nodes.

    measured   tlt train recipes/countdown/headline.toml, with responses kept: TLT, then without speculation
    computed   from the very lengths, with costs and acceptance as the run of TLT measured them; a step of TLT
               times what the run's other steps took for each computed second
    paper      its table, computed with a GPU-like cost curve and assumed lengths

    python -m benchmarks.plan_speed                     about 6 minutes on two quiet cores
    python -m benchmarks.plan_speed --runs FOLDER       the same from runs that are there: its tlt and off

Errors are computed / measured - 1.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser, run_child
from tlt.bench.report import environment, provenance, table, write_report
from tlt.cli.plan_speed import run_in
from tlt.plan.recorded import TunedPace, beside, errors_of, read_lengths, tuner_of
from tlt.plan.speed import GpuPace, log_normal, share
from tlt.report.record import read_metrics

Pairs = list[tuple[float, float]]
"""Seconds of rollouts, measured and computed."""
RECIPE = Path("recipes/countdown/headline.toml")
RUNS = {"tlt": (), "off": ("--rollout.speculation", "off")}
PAPER = {"Qwen2.5-7B": {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}, "Qwen2.5-32B": {4: 1.83, 8: 2.12}}
"""Model → 8-GPU nodes → end to end over VeRL (arXiv 2511.16665, as third parties quote it)."""
PAPER_STEPS = {"Qwen2.5-7B": (2, 0.012), "Qwen2.5-32B": (4, 0.020)}
"""Model → GPUs of a replica, seconds of a plain step: assumed, but for the 4 of the 32B, on which the paper
measured its drafts."""
PAPER_RESPONSES, PAPER_MEDIAN, PAPER_CAP = 512, 2048, 16_384
"""A step's responses, the median and the cap of their tokens: assumed."""
PAPER_ROLLOUT_SHARE = 0.85
"""Of a step without speculation at the largest number of nodes; the rest is divided among the nodes."""
PAPER_LINES = (
    f"a step has {PAPER_RESPONSES} responses, half of them above {PAPER_MEDIAN:,} tokens, one in twenty at"
    f" {PAPER_CAP:,} (cut): assumed; the paper's own lengths and batch are not known here",
    "a replica of the 7B has 2 GPUs and 12 ms a plain step, one of the 32B 4 and 20 ms: assumed; up to 512"
    " tokens in a forward cost the same",
    f"outside of the rollout {1 - PAPER_ROLLOUT_SHARE:.0%} of a step without speculation at the most nodes,"
    " and in proportion to one over the nodes: assumed",
    "costs and acceptance of drafts: those of the paper's 32B, for both models, whatever the batch",
    "off is this engine without speculation; the paper compares with VeRL, whose rollout also decodes above"
    " 32 requests without CUDA graphs",
    "nothing was fitted to the paper's column; the last column is what a drafted rollout would have to take"
    " for each computed second, and the range of `tlt plan speed` without --run ends at its largest",
)


def record_run(folder: Path, options: tuple[str, ...], num_steps: int) -> None:
    """Trains for some steps, the responses kept; no evaluation, which measures nothing here."""
    amounts = f"--run.num_steps {num_steps} --evaluation.num_problems 0 --run.keep_responses 1".split()
    train = [sys.executable, "-m", "tlt", "train", RECIPE, *amounts, *options]
    run_child([*train, "--run.out_dir", folder])


def compare(runs: Path) -> dict[str, Pairs]:
    """Returns the (measured, computed) seconds of the rollouts with and without drafts."""
    run = run_in(runs / "tlt")
    pace = TunedPace([tuner_of(state, run.config) for state in run.ranks])
    pairs = beside(run, pace)
    found = {"TLT": leave_one_out(pairs)}
    if (runs / "off").is_dir():
        how = len(run.ranks), run.config.rollout.max_batch_size, pace, False
        files = sorted((runs / "off" / "responses").glob("rollout-*.jsonl"))
        computed = [share(list(chain(*read_lengths(file))), *how).seconds for file in files][1:]
        measured = [step.rollout.seconds for step in read_metrics(runs / "off" / "metrics.jsonl")][1:]
        error = errors_of(pairs).mean
        found["off, as the tuners say"] = list(zip(measured, computed, strict=True))
        longer = [error * seconds for seconds in computed]
        found["off, longer by as much as TLT"] = list(zip(measured, longer, strict=True))
    return found


def leave_one_out(pairs: Pairs) -> Pairs:
    """Returns the pairs, the computed seconds of each times what the others took for each computed second."""
    measured, computed = (sum(pair[i] for pair in pairs) for i in (0, 1))
    return [(one, of_it * (measured - one) / (computed - of_it)) for one, of_it in pairs]


def errors(pairs: Pairs) -> dict[str, float]:
    """Returns the relative errors: of the median rollout, and of the sum of all."""
    measured, computed = (sum(pair[i] for pair in pairs) for i in (0, 1))
    median = statistics.median(abs(of_it / one - 1) for one, of_it in pairs)
    return {"median": median, "sum": computed / measured - 1}


def paper_rows() -> list[dict[str, Any]]:
    """Returns what the paper reports by model and number of nodes, and what is computed for it: a step is the
    same whatever the number, and so is the work outside of its rollout."""
    lengths, rows = log_normal(PAPER_MEDIAN, PAPER_CAP, PAPER_CAP, PAPER_RESPONSES), []
    for model, reported in PAPER.items():
        gpus, plain = PAPER_STEPS[model]
        rollouts = {}
        for nodes in reported:
            how = lengths, 8 * nodes // gpus, PAPER_RESPONSES, GpuPace(plain, 512)
            rollouts[nodes] = share(*how, False).seconds, share(*how, True).seconds
        most = max(reported)
        rest = rollouts[most][0] * (1 / PAPER_ROLLOUT_SHARE - 1) * most
        for nodes, (off, tlt) in rollouts.items():
            other, paper = rest / nodes, reported[nodes]
            computed = {
                "times": (off + other) / (tlt + other),
                "rollout_times": off / tlt,
                "needed": ((off + other) / paper - other) / tlt,
            }
            place = {"model": model, "nodes": nodes, "replicas": 8 * nodes // gpus}
            rows.append({**place, "paper": paper, **computed})
    return rows


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    parts = ["# `tlt plan speed` beside real steps of two ranks", *provenance(report)]
    parts.append("Errors are computed / measured - 1.")
    rows = []
    for name, one in report["beside"].items():
        rows.append([name, len(one["steps"]), *(f"{one['errors'][kind]:+.1%}" for kind in ("median", "sum"))])
    parts.append(table(["rollouts", "steps", "median error", "error of their sum"], rows))
    for name, one in report["beside"].items():
        steps = [[f"{measured:.2f}", f"{computed:.2f}"] for measured, computed in one["steps"]]
        parts += [f"## {name}", table(["measured, s", "computed, s"], steps)]
    columns = ["model", "nodes", "replicas", "paper, over VeRL", "computed, over off", "computed / paper - 1"]
    parts += [
        "## The paper's table by nodes",
        table([*columns, "rollout alone", "needed"], [_paper_cells(row) for row in report["paper"]]),
        "\n".join(f"- {line}" for line in PAPER_LINES),
    ]
    return "\n\n".join(parts) + "\n"


def _paper_cells(row: dict[str, Any]) -> list[Any]:
    times, paper = row["times"], row["paper"]
    place = [row["model"], row["nodes"], row["replicas"], paper, f"{times:.2f}", f"{times / paper - 1:+.0%}"]
    return [*place, f"{row['rollout_times']:.2f}", f"{row['needed']:.2f}"]


def main() -> None:
    parser = make_parser("plan_speed", __doc__, "benchmarks/results/plan-speed")
    parser.add_argument("--steps", type=int, default=7, help="of each real run; the first does not count")
    parser.add_argument("--runs", type=Path, help="folder with runs that are there: tlt, and off if any")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        if options.runs is None:
            for name, words in RUNS.items():
                record_run(folder / name, words, options.steps)
        found = compare(folder)
    report: dict[str, Any] = {
        "command": command_of(parser),
        "environment": environment(),
        "beside": {name: {"steps": steps, "errors": errors(steps)} for name, steps in found.items()},
        "paper": paper_rows(),
    }
    write_report(options.out, report, to_markdown(report))
    for name, one in report["beside"].items():
        median, of_sum = one["errors"]["median"], one["errors"]["sum"]
        print(f"{name}: median error of a rollout {median:.1%}, of all together {of_sum:+.1%}")


if __name__ == "__main__":
    sys.exit(carry_out("plan_speed", main))
