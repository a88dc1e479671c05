"""What does one RL step of a large model take, in seconds and memory? The whole policy, and LoRA, on one rank
and on two.

    python -m benchmarks.step_at_size countdown --geometry qwen2.5-0.5b --keep DIR --out benchmarks/results/step-at-size

The recipe's model is grown (benchmarks/grown.py), and every way is a run of two steps in
processes of its own. The second step counts: the first one packs and compiles. Memory is the largest
resident set of a rank.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, make_parser
from benchmarks.grown import grown_config, hold_still, plan_growth
from benchmarks.report import header, markdown, number, table, write_report
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.training.report.record import StepRecord, read_metrics

LORA = ("--lora.rank", "16", "--lora.alpha", "32", "--lora.base_dtype", "bfloat16")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "full": (1, ()),
    "full-sharded": (2, ("--parallel.policy", "fsdp")),
    "lora": (1, LORA),
    "lora-two-ranks": (2, LORA),
}
"""Ranks, and what is trained."""
NUM_STEPS = 2


def run_steps(
    options: argparse.Namespace, grown: Config, way: str, out_dir: Path, given: list[str]
) -> dict[str, Any]:
    """Trains in processes of its own; returns what the last step took and the largest resident set in MiB,
    or why it failed."""
    num_ranks, words = WAYS[way]
    ranks = {"--run.num_ranks": num_ranks, "--run.threads_per_rank": max(1, options.threads // num_ranks)}
    folders = {
        "--model.path": grown.model.path,
        "--drafter.path": grown.drafter.path,
        "--run.out_dir": out_dir,
    }
    amounts = {"--run.num_steps": NUM_STEPS, "--run.checkpoint_every": 0, "--evaluation.num_problems": 0}
    pairs = [str(word) for pair in {**folders, **amounts, **ranks}.items() for word in pair]
    train = ["tlt", "train", str(options.config), *hold_still([*pairs, *words, *given])]
    command = [sys.executable, "-m", "benchmarks.largest", *train]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"way": way, "failed": done.stderr.strip().rpartition("\n")[2]}
    step = read_metrics(out_dir / "metrics.jsonl")[-1]
    return {"way": way, **kept(step), "peak_mib": int(done.stdout.split()[-1])}


def kept(step: StepRecord) -> dict[str, Any]:
    """Returns what the report keeps of a step."""
    rollout, length = step.rollout, step.rollout.accept_length
    return {
        "num_responses": rollout.num_responses,
        "num_tokens": rollout.num_tokens,
        "rollout_seconds": rollout.seconds,
        "update_seconds": step.update.seconds,
        "step_seconds": step.step_seconds,
        "accept_length": None if math.isnan(length) else length,
    }


def to_markdown(report: dict[str, Any]) -> str:
    columns = ["", "tokens", "rollout, s", "update, s", "step, s", "accept length", "largest rank, GiB"]
    rows = [
        [
            run["way"],
            run["num_tokens"],
            number(run["rollout_seconds"], ".1f"),
            number(run["update_seconds"], ".1f"),
            number(run["step_seconds"], ".1f"),
            number(run["accept_length"]),
            number(run["peak_mib"] / 1024, ".1f"),
        ]
        for run in report["runs"]
        if "failed" not in run
    ]
    refused = [f"{run['way']}: {run['failed']}" for run in report["runs"] if "failed" in run]
    return markdown("One RL step of a large model", report, table(columns, rows), *refused)


def main() -> None:
    parser = make_parser("step_at_size", __doc__)
    parser.add_argument(
        "config", type=Path, help="a run's configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--geometry", required=True, help="a name such as qwen2.5-0.5b, or a config.json")
    parser.add_argument("--keep", type=Path, help="folder for what is grown; default: a temporary one")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="what is trained, on how many ranks"
    )
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    options, given = parser.parse_known_args()
    config = load_config(str(options.config), hold_still(given))
    words = " ".join([str(options.config), "--geometry", options.geometry, *given])
    report: dict[str, Any] = {**header(config, f"{parser.prog} {words}"), "runs": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        grown_config(config, plan_growth(config, options.geometry), options.keep) as (grown, geometry),
    ):
        report |= geometry
        for index, way in enumerate(options.ways):
            report["runs"].append(run_steps(options, grown, way, Path(folder) / str(index), given))
            print(json.dumps(report["runs"][-1]), flush=True)
            write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("step_at_size", main))
