"""How do time and memory of a step grow with the length of its responses? Whole runs, with speculation and
without.

    python -m benchmarks.growth recipes/math/math.toml --contexts 1024,4096,16384 --out benchmarks/results/growth

Every run takes the recipe's model, its window widened and its end-of-response token taken away, so that each
response fills the
context: the text means nothing, the work is that of real responses. Seconds are of one step of two ranks;
    memory is the largest resident set of a rank. "off" is the same run without speculation and without
    handing responses over.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.command import make_parser, run_child
from tlt.bench.report import environment, markdown, number, table, write_report
from tlt.config.load import load_config
from tlt.report.record import StepRecord, read_metrics

ARMS = {
    "off": ("--rollout.speculation", "off", "--rollout.migrate", "false"),
    "adaptive": ("--rollout.speculation", "adaptive"),
}
PROMPT_ROOM = 256
"""Positions left for the prompt."""


def endless_copy(model: Path, folder: Path, window: int, num_layers: int | None = None) -> Path:
    """Copies a checkpoint whose responses end at their limit alone: its stop token is one that it never
    writes. num_layers: of its first layers that stay; None: all."""
    shutil.copytree(model, folder)
    stop = {"eos_token_id": unused_token(folder)}
    change_json(folder / "config.json", lambda values: {"max_position_embeddings": window})
    change_json(folder / "generation_config.json", lambda values: stop)
    if num_layers is not None:
        fewer = {"num_hidden_layers": num_layers}
        change_json(
            folder / "config.json",
            lambda v: fewer | {k: v[k][:num_layers] for k in ("layer_types",) if k in v},
        )
        (weights,) = folder.glob("*.safetensors")
        kept = {name: tensor for name, tensor in load_file(weights).items() if layer_of(name) < num_layers}
        save_file(kept, weights, metadata={"format": "pt"})
    return folder


def change_json(path: Path, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes values of a JSON file; one that does not exist is made."""
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes(values)}))


def layer_of(name: str) -> int:
    """Returns the number of the layer that a tensor belongs to, -1 where it is none's."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def unused_token(model: Path) -> int:
    """Returns the padding token, which no model is trained to write."""
    pad: int = json.loads((model / "config.json").read_text())["pad_token_id"]
    return pad


def run_step(options: argparse.Namespace, arm: str, context: int, folder: Path) -> dict[str, Any]:
    """Trains for one step in processes of its own and returns what it took."""
    config = options.config
    model = endless_copy(
        load_config(str(config), {}).model.path, folder / "model", context + PROMPT_ROOM, options.layers
    )
    amounts = {
        "model.path": model,
        "run.out_dir": folder / "run",
        "run.num_steps": 1,
        "run.checkpoint_every": 0,
        "rollout.problems_per_step": options.problems,
        "rollout.samples_per_problem": 2,
        "sampling.max_tokens": context,
        "evaluation.num_problems": 0,
    }
    overrides = [word for key, value in amounts.items() for word in (f"--{key}", str(value))]
    peak_mib = largest_mib("tlt", "train", str(config), *overrides, *ARMS[arm])
    (step,) = read_metrics(folder / "run" / "metrics.jsonl")
    return {"context": context, "arm": arm, **kept(step), "peak_mib": peak_mib}


def largest_mib(*command: str) -> int:
    """Runs `python -m COMMAND` and returns the largest resident set among all its processes, in MiB."""
    return int(run_child([sys.executable, "-m", "benchmarks.growth", "--child", *command]).split()[-1])


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
        "strategy_seconds": rollout.strategy_seconds,
    }


def child(command: list[str]) -> int:
    """Runs a command and prints the largest resident set among all its processes, in MiB."""
    code = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, check=False).returncode
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    return code


def to_markdown(report: dict[str, Any]) -> str:
    rows = [
        [
            run["context"],
            run["arm"],
            run["num_tokens"],
            number(run["rollout_seconds"], ".1f"),
            number(1e6 * run["rollout_seconds"] / run["num_tokens"], ".0f"),
            number(run["update_seconds"], ".1f"),
            number(1e6 * run["update_seconds"] / run["num_tokens"], ".0f"),
            number(run["accept_length"]),
            run["peak_mib"],
        ]
        for run in report["runs"]
    ]
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
    return markdown("A step at growing contexts", report, table(columns, rows))


def measure(options: argparse.Namespace) -> None:
    contexts = [int(context) for context in options.contexts.split(",")]
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.growth {options.config} --contexts {options.contexts} --problems {options.problems}"
        + (f" --layers {options.layers}" if options.layers is not None else ""),
        "environment": environment(),
        "runs": [],
    }
    for context in contexts:
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as folder:
                report["runs"].append(run_step(options, arm, context, Path(folder)))
            print(json.dumps(report["runs"][-1]), flush=True)
            write_report(options.out, report, to_markdown(report))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    parser = make_parser("growth", __doc__)
    parser.add_argument("config", type=Path, help="the configuration of a run")
    parser.add_argument("--contexts", default="1024,4096,16384", help="tokens of every response")
    parser.add_argument("--problems", type=int, default=2, help="problems of the step, two responses each")
    parser.add_argument(
        "--layers", type=int, help="take the model's first layers alone: what a layer costs stays the same"
    )
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
