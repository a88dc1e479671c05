"""How do time and memory of a step grow with the length of its responses? Whole runs, with speculation and without.

    python -m benchmarks.growth recipes/math/math.toml --contexts 1024,4096,16384 --out benchmarks/results/growth

Every run takes the recipe's model, its window widened and its end-of-response token taken away, so that each response fills the
context: the text means nothing, the work is that of real responses. Seconds are of one step of two ranks; memory is the largest
resident set of a rank. "off" is the same run without speculation and without handing responses over.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tlt.bench.report import environment, number, provenance, table, write_report
from tlt.config.load import load_config

ARMS = {
    "off": ("--rollout.speculation", "off", "--rollout.migrate", "false"),
    "adaptive": ("--rollout.speculation", "adaptive"),
}
KEPT = (
    "num_responses", "num_tokens", "rollout_seconds", "update_seconds", "step_seconds", "accept_length", "strategy_seconds",
)  # fmt: skip
PROMPT_ROOM = 256
"""Positions left for the prompt."""


def endless_copy(model: Path, folder: Path, window: int) -> Path:
    """Copies a checkpoint whose responses end at their limit alone: its stop token is one that it never writes."""
    shutil.copytree(model, folder)
    for name, changes in (
        ("config.json", {"max_position_embeddings": window}),
        ("generation_config.json", {"eos_token_id": unused_token(folder)}),
    ):
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, **changes}))
    return folder


def unused_token(model: Path) -> int:
    """Returns the padding token, which no model is trained to write."""
    pad: int = json.loads((model / "config.json").read_text())["pad_token_id"]
    return pad


def run_step(config: Path, arm: str, context: int, num_problems: int, folder: Path) -> dict[str, Any]:
    """Trains for one step in processes of its own and returns what it took."""
    model = endless_copy(load_config(str(config), {}).model.path, folder / "model", context + PROMPT_ROOM)
    amounts = {
        "model.path": model, "run.out_dir": folder / "run", "run.num_steps": 1, "run.checkpoint_every": 0,
        "rollout.problems_per_step": num_problems, "rollout.samples_per_problem": 2, "sampling.max_tokens": context,
        "evaluation.num_problems": 0,
    }  # fmt: skip
    overrides = [word for key, value in amounts.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "benchmarks.growth", "--child", "tlt", "train", str(config), *overrides, *ARMS[arm]]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"context {context}, {arm}: exit code {done.returncode}\n{done.stderr}")
    step = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    kept = (
        "num_responses",
        "num_tokens",
        "rollout_seconds",
        "update_seconds",
        "step_seconds",
        "accept_length",
        "strategy_seconds",
    )
    return {"context": context, "arm": arm, **{key: step[key] for key in kept}, "peak_mib": int(done.stdout.split()[-1])}


def child(command: list[str]) -> int:
    """Runs a command and prints the largest resident set among all its processes, in MiB."""
    code = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, check=False).returncode
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    return code


def to_markdown(report: dict[str, Any]) -> str:
    rows = [
        [
            run["context"], run["arm"], run["num_tokens"], number(run["rollout_seconds"], ".1f"),
            number(1e6 * run["rollout_seconds"] / run["num_tokens"], ".0f"), number(run["update_seconds"], ".1f"),
            number(1e6 * run["update_seconds"] / run["num_tokens"], ".0f"), number(run["accept_length"]), run["peak_mib"],
        ]
        for run in report["runs"]
    ]  # fmt: skip
    columns = [
        "context",
        "speculation",
        "tokens",
        "rollout, s",
        "µs a token",
        "update, s",
        "µs a token",
        "accept length",
        "MiB",
    ]
    return "\n\n".join(["# A step at growing contexts", *provenance(report), table(columns, rows)]) + "\n"


def measure(options: argparse.Namespace) -> None:
    contexts = [int(context) for context in options.contexts.split(",")]
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.growth {options.config} --contexts {options.contexts} --problems {options.problems}",
        "environment": environment(),
        "runs": [],
    }
    for context in contexts:
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as folder:
                report["runs"].append(run_step(options.config, arm, context, options.problems, Path(folder)))
            print(json.dumps(report["runs"][-1]), flush=True)
            write_report(options.out, report, to_markdown(report))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="the configuration of a run")
    parser.add_argument("--contexts", default="1024,4096,16384", help="tokens of every response")
    parser.add_argument("--problems", type=int, default=2, help="problems of the step, two responses each")
    parser.add_argument("--out", type=Path, required=True, help="results go to OUT.json and OUT.md")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
