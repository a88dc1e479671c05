"""Drafters that are trained while the run goes on against the same drafters left as they are: RL runs with one
seed, which take their steps in turns (train.py).

    python -m benchmarks.online countdown --drafters hass=DIR,dspark=DIR --steps 100 --minutes 13 --out OUT

    off            no drafts
    NAME frozen    drafts by the drafter in DIR
    NAME online    the same; idle ranks train it

All else is the configuration's, for all runs alike: to compare accept lengths give chains of one length,
--rollout.speculation learned:7x1x7. All runs have the same tokens,
rewards and weights by the law; responses that differ are counted. The same command continues the runs.

--harder OPTIONS moves the policy: from step --harder-from on (default: the middle) the problems are those of these
options of the task, as for `tlt task`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import carry_out, make_parser, words
from benchmarks.drafter_forms import said
from benchmarks.report import Changes, header, number, ratio_text, table, with_changes, write_report
from benchmarks.train import OFF, Plan, launch_runs
from benchmarks.train_report import summarize_runs, train_markdown
from tlt.apps.run.start import pin, preflight
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.files import check_output_file, with_folder, write_jsonl
from tlt.base.types import Problem, UserError
from tlt.tasks.base import make_problems
from tlt.training.problems import problems_of_step
from tlt.training.report.ratio import Ratio
from tlt.training.report.record import read_metrics

REFERENCE, FROZEN, ONLINE = "off", "frozen", "online"
NUM_WINDOWS = 5
Steps = Sequence[Mapping[str, Any]]


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns options and configuration."""
    parser = make_parser("online", __doc__)
    parser.add_argument(
        "config", type=Path, help="TOML configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--drafters", type=words, required=True, help="NAME=FOLDER, separated by commas")
    parser.add_argument(
        "--rates", type=words, default=(), help="NAME=RATE: learning rates other than drafter.learning_rate"
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="of every run, those of earlier sessions included"
    )
    parser.add_argument(
        "--minutes", type=float, default=13.0, help="no round begins that would not end within them"
    )
    parser.add_argument(
        "--harder", type=json.loads, help="the task's options for the later problems, as JSON"
    )
    parser.add_argument("--harder-from", type=int, help="updates before the first step that takes them")
    options, overrides = parser.parse_known_args(arguments)
    if options.harder_from is None:
        options.harder_from = options.steps // 2
    options.drafters = dict(word.partition("=")[::2] for word in options.drafters)
    options.rates = dict(word.partition("=")[::2] for word in options.rates)
    if missing := [name for name, folder in options.drafters.items() if not Path(folder).is_dir()]:
        raise UserError(f"--drafters: {missing[0]} names no folder; give NAME=FOLDER")
    if unknown := options.rates.keys() - options.drafters.keys():
        raise UserError(f"--rates: {min(unknown)} is none of --drafters")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    return options, load_config(options.config, ["--run.out_dir", "runs/online", *overrides])


def runs_of(drafters: Mapping[str, str], rates: Mapping[str, str]) -> dict[str, Changes]:
    """Returns the runs by name, as their changes of the configuration; off comes first.

    drafters: folders by name.
    rates: learning rates by name; the configuration's for the others.
    """
    runs: dict[str, Changes] = {REFERENCE: OFF}
    for name, folder in drafters.items():
        path = str(Path(folder).resolve())
        rate = {"learning_rate": float(rates[name])} if name in rates else {}
        runs[f"{name} {FROZEN}"] = {"drafter": {"path": path, "train": False}}
        runs[f"{name} {ONLINE}"] = {"drafter": {"path": path, "train": True, **rate}}
    return runs


def with_harder_problems(config: Config, options: argparse.Namespace) -> Config:
    """Returns the configuration whose problems become harder at a step. They are data, written into run.out_dir in
    the order in which steps take them."""
    task, per_step = config.task, config.rollout.problems_per_step
    num = per_step * options.steps
    early, late = (
        make_problems(task.name, num, config.run.seed, {"split": "train", **given})
        for given in (task.options, options.harder)
    )
    problems: list[dict[str, Any]] = [{}] * num
    places = [Problem(str(place), (), {}) for place in range(num)]
    for step in range(options.steps):
        source = late if step >= options.harder_from else early
        for index, taken in enumerate(problems_of_step(places, step, per_step, config.run.seed)):
            problem_id = f"step {step + 1}, problem {index + 1}"
            problems[int(taken.problem_id)] = {**source[step * per_step + index], "problem_id": problem_id}
    path = config.run.out_dir / "problems.jsonl"
    write_jsonl(with_folder(path), problems)
    return with_changes(config, {"task": {"data": str(path), "options": {}, "num_problems": None}})


def summarize(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Summarizes the runs in the folder as train.py does; each step also has what its drafter did."""
    report = summarize_runs(folder, names)
    for name, run in report["runs"].items():
        for step, record in zip(run["steps"], read_metrics(folder / name / "metrics.jsonl"), strict=False):
            step |= {
                "reward": record.rewards.mean,
                "response_tokens": record.rollout.num_tokens / record.rollout.num_responses,
                "accept_length": finite(record.rollout.accept_length),
                "acceptance": finite(record.drafter.acceptance),
                "trained_tokens": record.drafter.tokens,
            }
    return report


def finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report of train.py, online against frozen by drafter, and all of it along the run."""
    page = train_markdown("Drafters trained while the run goes on, and left as they are", report)
    return "\n\n".join([page.rstrip(), *online_over_frozen(report), *along_the_run(report)]) + "\n"


def drafters_of(report: Mapping[str, Any]) -> list[str]:
    return [name.removesuffix(f" {ONLINE}") for name in report["runs"] if name.endswith(f" {ONLINE}")]


def online_over_frozen(report: Mapping[str, Any]) -> list[str]:
    """Returns a table: what training brought each drafter, over all steps."""
    rows = []
    for name in drafters_of(report):
        frozen, online = (report["runs"][f"{name} {way}"]["steps"] for way in (FROZEN, ONLINE))
        rows.append(
            [
                name,
                ratio(frozen, online, "seconds"),
                ratio(frozen, online, "rollout_seconds"),
                ratio(online, frozen, "accept_length"),
                mean(online, "trained_tokens", ".0f"),
            ]
        )
    columns = ["", "step time, frozen / online", "rollout time, frozen / online"]
    columns += ["accept length, online / frozen", "tokens trained on, a step"]
    return ["## Online against frozen", table(columns, rows)]


def along_the_run(report: Mapping[str, Any]) -> list[str]:
    """Returns a table over consecutive parts of the run, in which the policy moves away from the one that the
    drafters were trained for."""
    runs = {name: run["steps"] for name, run in report["runs"].items()}
    parts = [part for part in np.array_split(np.arange(report["num_steps"]), NUM_WINDOWS) if len(part)]

    def row(title: str, cell: Callable[..., str], *of: Steps) -> list[str]:
        return [title, *(cell(*(steps[part[0] : part[-1] + 1] for steps in of)) for part in parts)]

    off = runs[REFERENCE]
    rows = [
        row("reward", lambda steps: mean(steps, "reward"), off),
        row("tokens of a response", lambda steps: mean(steps, "response_tokens", ".0f"), off),
    ]
    learned = [name for name in runs if name != REFERENCE]
    rows += [row(f"accept length, {n}", lambda steps: mean(steps, "accept_length"), runs[n]) for n in learned]
    pairs = [(name, runs[f"{name} {FROZEN}"], runs[f"{name} {ONLINE}"]) for name in drafters_of(report)]
    for name, frozen, online in pairs:
        title = f"accept length, {name} online / frozen"
        rows.append(row(title, lambda a, b: ratio(b, a, "accept_length"), frozen, online))
    rows += [
        row(f"acceptance, {n}", lambda steps: mean(steps, "acceptance", ".3f"), runs[n]) for n in learned
    ]
    rows += [row(f"step time, off / {n}", lambda a, b: ratio(a, b, "seconds"), off, runs[n]) for n in learned]
    for name, frozen, online in pairs:
        title = f"step time, {name} frozen / online"
        rows.append(row(title, lambda a, b: ratio(a, b, "seconds"), frozen, online))
    explained = (
        "Acceptance: the mean of sum_v min(p, q) over response tokens, the highest acceptance rate of a single draft "
        "(docs/drafter.md), measured every drafter.check_every-th step; of a block drafter, its first drafted token alone."
    )
    columns = ["", *(f"steps {part[0] + 1} – {part[-1] + 1}" for part in parts)]
    return ["## Along the run", explained, table(columns, rows)]


def mean(steps: Steps, key: str, form: str = ".2f") -> str:
    known = [step[key] for step in steps if step[key] is not None]
    return number(float(np.mean(known)) if known else None, form)


def ratio(base: Steps, other: Steps, key: str) -> str:
    """Returns base / other, step by step, as text; a dash where no step of both has the figure."""
    pairs = [(a[key], b[key]) for a, b in zip(base, other, strict=True) if a[key] and b[key]]
    return ratio_text(asdict(Ratio.of([a / b for a, b in pairs]))) if pairs else number(None)


def benchmark(arguments: Sequence[str]) -> int:
    options, config = parse(arguments)
    described = {**header(config, said("online", arguments)), "harder": options.harder}
    config = pin(config if options.harder is None else with_harder_problems(config, options))
    preflight(config)
    runs = runs_of(options.drafters, options.rates)
    code = launch_runs(config, Plan(runs, options.steps, options.minutes))
    if code in (0, 130, 143):
        report = {**described, **summarize(config.run.out_dir, tuple(runs))}
        write_report(options.out, report, to_markdown(report))
        print(to_markdown(report))
    return code


if __name__ == "__main__":
    sys.exit(carry_out("online", lambda: benchmark(sys.argv[1:])))
