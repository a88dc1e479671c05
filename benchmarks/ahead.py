"""What generating ahead of the policy is worth: runs with one seed, a step of each in turns (tlt/bench/train.py).

off       no speculation                       ahead    TLT, and idle ranks generate the next step's responses
tlt       TLT as it is                         ahead-2  … of the next two steps
frozen    TLT, its drafter not trained         adaptive … where that is worth more than other uses of idle time

headline   steps of recipes/countdown/headline.toml      tail   8 responses a step: a rank idles for half of the rollout
quickstart steps of recipes/countdown/quickstart.toml    shift    the ablation's, in whose middle the puzzles become harder

python -m benchmarks.ahead headline --minutes 12         # again: continues where the time was over
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ablation
from tlt.accounts import IdleUse
from tlt.bench.report import Changes, header, table, write_report
from tlt.bench.train import FROZEN, OFF, Plan, launch_runs
from tlt.bench.train_report import summarize, to_markdown
from tlt.config.load import load_config
from tlt.files import read_jsonl
from tlt.training.start import preflight
from tlt.types import UserError

RUNS: dict[str, Changes] = {
    "off": OFF,
    "tlt": {},
    "ahead": {"rollout": {"ahead": 1}},
    "ahead-2": {"rollout": {"ahead": 2}},
    "adaptive": {"rollout": {"ahead": "adaptive"}},
    "frozen": FROZEN,
}


@dataclass(frozen=True)
class Part:
    """A configuration, overrides of it, the number of steps, and the task's options from the middle on (None: as before)."""

    config: str
    overrides: tuple[str, ...]
    num_steps: int
    later_options: dict[str, Any] | None = None


TAIL = ("--rollout.problems_per_step=2", "--rollout.samples_per_problem=4", "--sampling.max_tokens=3600")
SHIFT = ablation.PARTS["shift"]
PARTS = {
    "headline": Part("recipes/countdown/headline.toml", (), 10),
    "tail": Part("recipes/countdown/headline.toml", TAIL, 16),
    "quickstart": Part("recipes/countdown/quickstart.toml", (), 12),
    "shift": Part("recipes/countdown/quickstart.toml", SHIFT.overrides, 120, SHIFT.later_options),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--runs", default="off,tlt,ahead", help=f"of {', '.join(RUNS)}; the first is the reference")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    part, runs = PARTS[options.part], {name: RUNS[name] for name in options.runs.split(",")}
    out = options.out or Path("benchmarks/results") / f"ahead-{options.part}"
    num_steps = options.steps or part.num_steps
    always = ["--run.out_dir", f"runs/ahead-{options.part}", "--run.num_steps", str(num_steps)]
    config = load_config(part.config, [*always, *part.overrides, *overrides])
    preflight(config)
    config.run.out_dir.mkdir(parents=True, exist_ok=True)
    shift = None if part.later_options is None else (num_steps // 2, part.later_options)
    code = launch_runs(config, Plan(runs, num_steps, options.minutes, shift))
    if code not in (0, 130, 143):
        return code
    command = " ".join(["python -m benchmarks.ahead", *sys.argv[1:]])
    report = {**header(config, command), **summarize(config.run.out_dir, tuple(runs))}
    report["ahead"] = {name: ahead_of(config.run.out_dir / name / "metrics.jsonl") for name in runs}
    text = to_markdown(f"Generating ahead of the policy: {options.part}", report)
    write_report(out, report, text + "\n" + ahead_table(report["ahead"]))
    return code


def ahead_of(path: Path) -> dict[str, Any]:
    """Returns what a run's records say of generating ahead, summed over its steps."""
    records = [record for _, record in read_jsonl(path, str(path))]
    ages = sorted({age for record in records for age in record["followed_by_age"]})
    return {
        "num_tokens": sum(record["num_tokens"] for record in records),
        "idle_seconds": sum(record["idle_seconds"] for record in records),
        "ahead_seconds": sum(record["ahead_seconds"] for record in records),
        "ahead_tokens": sum(record["ahead_tokens"] for record in records),
        "drafter_tokens": sum(record["drafter_tokens"] for record in records),
        "drafter_acceptance": [record["drafter_acceptance"] for record in records if record["drafter_acceptance"] is not None],
        "idle_seconds_by_use": {use: sum(record["idle_seconds_by_use"].get(use, 0.0) for record in records) for use in IdleUse},
        "idle_gain": records[-1]["idle_gain"],
        "idle_cost": records[-1]["idle_cost"],
        "won_seconds": sum(record["won_seconds"] for record in records),
        "followed": {age: sum(record["followed_by_age"].get(age, 0) for record in records) for age in ages},
    }


def ahead_table(found: dict[str, dict[str, Any]]) -> str:
    columns = ["run", "tokens", "idle s", "tokens ahead", "kept of references, by age", "s won by them", "drafter tokens"]
    columns += ["its acceptance, first and second half"]
    columns += ["s ahead / training / rest", "gain and cost of a second ahead", "… of training"]
    rows = []
    for name, one in found.items():
        followed = ", ".join(f"{age}: {num:,}" for age, num in one["followed"].items()) or "–"
        won = f"{one['won_seconds']:.1f}"
        done = [f"{one['idle_seconds']:.0f}", f"{one['ahead_tokens']:,}", followed, won, f"{one['drafter_tokens']:,}"]
        done.append(", ".join(f"{half:.3f}" for half in halves(one["drafter_acceptance"])) or "–")
        seconds = " / ".join(f"{one['idle_seconds_by_use'][use]:.0f}" for use in IdleUse)
        rows.append([name, f"{one['num_tokens']:,}", *done, seconds, worth(one, "ahead"), worth(one, "train")])
    return "\n\n".join(["## Ahead, summed over the steps", table(columns, rows)]) + "\n"


def halves(values: list[float]) -> list[float]:
    """Returns the means of the first and of the second half of what was measured; nothing of fewer than two values."""
    middle = len(values) // 2
    return [sum(half) / len(half) for half in (values[:middle], values[middle:]) if middle]


def worth(found: dict[str, Any], use: str) -> str:
    """Returns the last estimates of what a second of a rank's idle time in this use brings, and costs, in seconds of a step."""
    return f"{found['idle_gain'][use]:.2f}, {found['idle_cost'][use]:.2f}" if use in found["idle_cost"] else "–"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"ahead: error: {error}")
