"""Is a sharded run the replicated run? Updates alone, whole runs, and a run that goes from two ranks to one and back. Float64.

    python -m benchmarks.scale.fsdp --out benchmarks/results/scale-fsdp        # writes .json and .md

    updates   the shipped Countdown model, a few updates on made-up responses; sharded against replicated, on as many ranks
    runs      the quickstart in small through the command line: tokens, rewards, losses and the final policy

Nothing here is a time: two cores say nothing about FSDP's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tlt.bench.report import environment, provenance, table, write_report
from tlt.build.model import open_model
from tlt.build.policy import build_policy_trainer
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.distributed.launch import launch
from tlt.distributed.sharding import Gathered
from tlt.distributed.signals import StopRequest
from tlt.distributed.world import World, gather_objects, init_process_group_from_env, shutdown
from tlt.files import dumps
from tlt.rl.update import PolicyTrainer
from tlt.types import Reward, Rollout

FREE = {"optimizer.clip_grad_norm": "1e9"}
ONCE = {"parallel.policy": "fsdp", "parallel.reduce_each_micro_batch": "false"}
EACH = {"parallel.policy": "fsdp"}
BASE = {"run.dtype": "float64", "run.device": "cpu", "optimizer.learning_rate": "1e-3"}

UPDATES: dict[str, dict[str, str]] = {
    "reduced once a step": {**FREE, **ONCE},
    "reduced once a step, activations checkpointed": {**FREE, **ONCE, "parallel.checkpoint_activations": "true"},
    "reduced once a step, KL in the loss, two minibatches": {
        **FREE, **ONCE, "algorithm.kl_coefficient": "0.1", "algorithm.minibatches": "2",
    },
    "reduced every micro-batch": {**FREE, **EACH},
    "reduced every micro-batch, clipped": {**EACH, "optimizer.clip_grad_norm": "0.01"},
}  # fmt: skip
"""Keys of the sharded variants; the replicated one has the same but for [parallel]."""

SMALL = {
    **BASE,
    **FREE,
    "run.num_steps": "3",
    "rollout.problems_per_step": "4",
    "rollout.samples_per_problem": "4",
    "rollout.speculation": "off",
    "drafter.train": "false",
    "sampling.max_tokens": "192",
    "evaluation.num_problems": "0",
    "run.time_limit_minutes": "none",
}


# ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def made_up(step: int, vocab_size: int) -> tuple[list[Rollout], list[Reward]]:
    """Twelve ragged responses to three problems."""
    rng = random.Random(step)
    rollouts, rewards = [], []
    for number in range(12):
        prompt, tokens = (tuple(rng.randrange(vocab_size) for _ in range(n)) for n in (12, rng.choice([3, 30, 90])))
        rollouts.append(Rollout(f"p{number // 4}", number % 4, prompt, tokens, (-1.0,) * len(tokens), "stop", step))
        rewards.append(Reward(float(rng.random() < 0.5), True))
    return rollouts, rewards


def configuration(changes: Mapping[str, str]) -> Config:
    """The quickstart with these values."""
    words = [word for key, value in {**BASE, "algorithm.tokens_per_micro_batch": "128", **changes}.items()
             for word in (f"--{key}", value)]  # fmt: skip
    return load_config("countdown", words)


def after_updates(
    config: Config, world: World, is_sharded: bool, num_updates: int
) -> tuple[PolicyTrainer, list[float], list[float]]:
    """The trainer behind some updates; their losses and gradient norms."""
    model = open_model(config.model.path, torch.float64)
    trainer = build_policy_trainer(config, model, world, is_sharded)
    metrics = [trainer.update(*made_up(step, model.config.vocab_size), step) for step in range(num_updates)]
    return trainer, [m.loss for m in metrics], [m.grad_norm for m in metrics]


def bytes_held(trainer: PolicyTrainer) -> int:
    """Bytes of weights and both moments on this rank."""
    tensors: list[Tensor] = list(trainer.model.parameters())
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def update_rank(argument: str, stop: StopRequest) -> None:
    """Runs on every rank; the first one writes down what it found."""
    asked = json.loads(argument)
    torch.set_num_threads(1)
    world = init_process_group_from_env("cpu", group_of_one=True)
    rows = []
    for name, changes in UPDATES.items():
        config = configuration(changes)
        found = [after_updates(config, world, is_sharded, asked["num_updates"]) for is_sharded in (False, True)]
        (replicated, losses, norms), (sharded, sharded_losses, sharded_norms) = found
        expected = {name: parameter.detach() for name, parameter in replicated.model.named_parameters()}
        apart = {name: float((t.detach() - expected[name]).abs().max()) for name, t in Gathered(sharded.model).items()}
        held = gather_objects(world, (bytes_held(replicated), bytes_held(sharded)))
        rows.append(
            {
                "ranks": world.world_size,
                "variant": name,
                "tensors": len(apart),
                "equal_tensors": sum(value == 0 for value in apart.values()),
                "weights_apart": max(apart.values()),
                "losses_apart": max(abs(a - b) for a, b in zip(losses, sharded_losses, strict=True)),
                "norms_apart": max(abs(a / b - 1) for a, b in zip(norms, sharded_norms, strict=True)),
                "bytes_replicated": max(a for a, _ in held),
                "bytes_sharded": max(b for _, b in held),
            }
        )
        del replicated, sharded, found, expected
    if world.is_leader:
        Path(asked["out"]).write_text(dumps(rows))
    shutdown(world)


def measure_updates(num_ranks: int, num_updates: int, folder: Path) -> list[dict[str, Any]]:
    out = folder / f"updates-{num_ranks}.json"
    argument = json.dumps({"num_updates": num_updates, "out": str(out)})
    if (code := launch(argument, num_ranks, "benchmarks.scale.fsdp:update_rank")) != 0:
        sys.exit(code)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Finished:
    """A run's records and its final policy."""

    records: list[dict[str, Any]]
    policy: dict[str, Tensor]

    @staticmethod
    def of(folder: Path) -> Finished:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return Finished([json.loads(line) for line in lines], load_file(folder / "policy" / "model.safetensors"))


def train(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tlt", "train", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"tlt train {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")


def run(folder: Path, **changes: str) -> Finished:
    values = {**SMALL, "run.out_dir": str(folder), **{key.replace("__", "."): value for key, value in changes.items()}}
    train("countdown", *(word for key, value in values.items() for word in (f"--{key}", value)))
    return Finished.of(folder)


def wander(folder: Path, ranks_and_steps: Sequence[tuple[str, str]]) -> Finished:
    """A sharded run that is resumed on other numbers of ranks."""
    (num_ranks, num_steps), *rest = ranks_and_steps
    run(folder, parallel__policy="fsdp", run__num_ranks=num_ranks, run__num_steps=num_steps)
    for num_ranks, num_steps in rest:
        train("--resume", str(folder), "--run.num_ranks", num_ranks, "--run.num_steps", num_steps)
    return Finished.of(folder)


def compared(name: str, ours: Finished, theirs: Finished) -> dict[str, Any]:
    exact = ("num_responses", "num_tokens", "response_tokens", "reward_mean", "solve_rate")
    pairs = list(zip(ours.records, theirs.records, strict=True))
    apart = {name: float((tensor - theirs.policy[name]).abs().max()) for name, tensor in ours.policy.items()}
    return {
        "run": name,
        "steps": len(pairs),
        "same_tokens_and_rewards": all(a[key] == b[key] for a, b in pairs for key in exact),
        "losses_apart": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "tensors": len(apart),
        "equal_tensors": sum(value == 0 for value in apart.values()),
        "weights_apart": max(apart.values()),
    }


def measure_runs(folder: Path) -> list[dict[str, Any]]:
    two, four = (run(folder / f"replicated-{n}", run__num_ranks=n, parallel__policy="replicate") for n in ("2", "4"))
    once = run(folder / "once", parallel__policy="fsdp", parallel__reduce_each_micro_batch="false")
    rows = [compared("2 ranks, reduced once a step", once, two)]
    rows.append(compared("2 ranks", run(folder / "each", parallel__policy="fsdp"), two))
    rows.append(compared("4 ranks", run(folder / "four", parallel__policy="fsdp", run__num_ranks="4"), four))
    rows.append(compared("2 ranks, then 1, then 2", wander(folder / "wandering", [("2", "1"), ("1", "2"), ("2", "3")]), two))
    return rows


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def markdown(report: Mapping[str, Any]) -> str:
    updates = [
        [
            row["ranks"],
            row["variant"],
            f"{row['equal_tensors']} of {row['tensors']}",
            f"{row['weights_apart']:.1e}",
            f"{row['losses_apart']:.1e}",
            f"{row['norms_apart']:.1e}",
            f"{row['bytes_replicated'] / 1e6:.1f} → {row['bytes_sharded'] / 1e6:.1f}",
        ]
        for row in report["updates"]
    ]
    runs = [
        [
            row["run"],
            row["steps"],
            "yes" if row["same_tokens_and_rewards"] else "NO",
            f"{row['losses_apart']:.1e}",
            f"{row['equal_tensors']} of {row['tensors']}",
            f"{row['weights_apart']:.1e}",
        ]
        for row in report["runs"]
    ]
    lines = ["# The sharded update against the replicated one", *provenance(report)]
    if updates:
        columns = ["ranks", "sharded update", "equal tensors", "weights", "losses", "norms (relative)", "MB a rank"]
        lines += [f"## {report['num_updates']} updates of the Countdown model, float64", table(columns, updates)]
        lines += ["Weights, losses and norms: largest difference. MB: weights and both moments, replicated → sharded."]
    if runs:
        columns = ["sharded run", "steps", "same tokens and rewards", "losses", "equal tensors", "weights"]
        lines += ["## Whole runs, each against the replicated run on as many ranks (the last: on two)", table(columns, runs)]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results are written to OUT.json and OUT.md")
    parser.add_argument("--updates", type=int, default=5, help="updates of each variant")
    parser.add_argument("--parts", default="updates,runs", help="what to measure")
    options = parser.parse_args()
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory(prefix="fsdp-") as scratch:
        folder = Path(scratch)
        numbers = (1, 2) if "updates" in parts else ()
        updates = [row for num_ranks in numbers for row in measure_updates(num_ranks, options.updates, folder)]
        runs = measure_runs(folder) if "runs" in parts else []
    report = {
        "command": f"python -m benchmarks.scale.fsdp --updates {options.updates} --parts {options.parts}",
        "environment": environment(),
        "num_updates": options.updates,
        "updates": updates,
        "runs": runs,
    }
    write_report(options.out, report, markdown(report))


if __name__ == "__main__":
    main()
