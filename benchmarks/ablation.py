"""Must the drafter follow the policy? Five runs with one seed, a step of each in turns (tlt/bench/train.py).

    off      no speculation                       online   the shipped drafter, trained in idle time
    ngram    retrieval alone, no model            random   trained in idle time too, but from random weights
    frozen   the shipped drafter as it is

    recipe   30 steps of the quickstart, with half its responses
    shift    240 small steps at three times the learning rate; in the middle the puzzles become harder, so that the policy moves

Drafts are chains of six everywhere, none cut short: a tuner would choose other strategies for other drafters, and accept
lengths would not compare. Seconds are therefore not the best that each drafter allows.

    python -m benchmarks.ablation recipe --minutes 14
    python -m benchmarks.ablation shift --minutes 14        # again: continues where the time was over
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plots import check_plots, plot_runs
from tlt.bench.report import Changes, header, number, table, write_report
from tlt.bench.train import OFF, Plan, launch_runs
from tlt.bench.train_report import summarize, to_markdown
from tlt.config.load import load_config
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.hf_config import load_model_config
from tlt.training.start import preflight
from tlt.types import UserError

NUM_WINDOWS = 6
LEARNED = {"rollout": {"speculation": "learned:6x1x6"}}


@dataclass(frozen=True)
class Part:
    """Overrides of the configuration, the number of steps, and the task's options from the middle on (None: as before)."""

    overrides: tuple[str, ...]
    num_steps: int
    later_options: dict[str, Any] | None = None


PARTS = {
    "recipe": Part(("--rollout.samples_per_problem", "4"), num_steps=30),
    "shift": Part(
        (
            "--rollout.problems_per_step=4",
            "--rollout.samples_per_problem=4",
            "--sampling.max_tokens=256",
            "--optimizer.learning_rate=3e-4",
            "--task.options={mix = {2 = 0.5, 3 = 0.5}, max_number = 10, max_target = 30}",
        ),
        num_steps=240,
        later_options={"mix": {"2": 0.2, "3": 0.6, "4": 0.2}, "max_number": 30, "max_target": 60},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--config", default="recipes/countdown/quickstart.toml")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    part = PARTS[options.part]
    num_steps = options.steps or part.num_steps
    out = options.out or Path("benchmarks/results") / f"ablation-{options.part}"
    check_plots()
    always = ["--run.out_dir", f"runs/ablation-{options.part}", "--drafter.confidence_threshold=0"]
    config = load_config(options.config, [*always, *part.overrides, *overrides])
    preflight(config)
    config.run.out_dir.mkdir(parents=True, exist_ok=True)
    shift = None if part.later_options is None else (num_steps // 2, part.later_options)
    random_drafter = config.run.out_dir / "random-drafter"
    if not random_drafter.exists():
        model = DraftModel(drafter_shape(load_model_config(config.model.path))).initialize(config.run.seed)
        save_drafter(random_drafter, model, torch.float32)

    runs: dict[str, Changes] = {
        "off": OFF,
        "ngram": {"rollout": {"speculation": "ngram:6x1x6"}, "drafter": {"path": None, "train": False}},
        "frozen": {**LEARNED, "drafter": {"train": False}},
        "online": {**LEARNED, "drafter": {"train": True}},
        "random": {**LEARNED, "drafter": {"train": True, "path": random_drafter}},
    }
    code = launch_runs(config, Plan(runs, num_steps, options.minutes, shift))
    if code not in (0, 130, 143):
        return code
    command = " ".join(["python -m benchmarks.ablation", *sys.argv[1:]])
    report = {**header(config, command), "later_options": part.later_options, **summarize(config.run.out_dir, tuple(runs))}
    write_report(out, report, to_markdown(f"Which drafter, over RL steps: {options.part}", report) + "\n" + windows(report))
    marked = None if shift is None else shift[0]
    plot_runs({name: run["steps"] for name, run in report["runs"].items()}, out.with_name(out.name + ".svg"), marked)
    return code


def windows(report: dict[str, Any]) -> str:
    """Mean accept length and reward over consecutive parts of the run."""
    parts = [part for part in np.array_split(np.arange(report["num_steps"]), NUM_WINDOWS) if len(part)]
    columns = ["", *(f"steps {part[0]} – {part[-1]}" for part in parts)]

    def row(title: str, steps: list[dict[str, Any]], key: str, form: str) -> list[str]:
        means = [np.mean([steps[i][key] for i in part]) for part in parts]
        return [title, *(number(None if np.isnan(mean) else float(mean), form) for mean in means)]

    runs = report["runs"]
    rows = [row(f"accept length, {name}", run["steps"], "accept_length", ".2f") for name, run in runs.items() if name != "off"]
    rows += [row(f"reward, {name}", run["steps"], "reward_mean", ".4f") for name, run in runs.items()]
    return "\n\n".join(["## Along the run", table(columns, rows)]) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"ablation: error: {error}")
