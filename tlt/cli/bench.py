"""`tlt bench`: what to measure of a configuration, and where to. How it is measured is tlt.bench's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tlt.cli.engine import show_busy
from tlt.cli.options import Names, Numbers, WithOverrides
from tlt.config.load import load_config
from tlt.files import Record, check_output_file
from tlt.kinds import PositiveFloat, PositiveInt
from tlt.types import UserError

Config = Annotated[Positional[Path], arg(metavar="CONFIG")]
Stem = Annotated[Path, arg(metavar="OUT")]
PARTS = ("constant", "workload")


class BenchRollout(WithOverrides):
    """Measure how much faster rollouts are with speculation than without.

    Every key of the configuration can be overridden, as for tlt train.
    """

    config: Config
    """TOML configuration, or the name of a recipe such as countdown."""
    out: Stem
    """Where the results go: OUT.json and OUT.md."""
    parts: Names = PARTS
    """What to measure: constant (batches that stay at one size), workload (the configuration's own phases)."""
    variants: Names = ("adaptive",)
    """What to compare with off: adaptive, beg-mab, fixed strategies such as 4x1x4 or ngram:8x1x8."""
    batches: Numbers = (1, 2, 4, 8, 16, 32)
    """Batch sizes to measure in the part called constant."""
    rounds: PositiveInt = 8
    """Turns of every variant at each batch size of the part called constant."""
    seconds: PositiveFloat = 2.0
    """Length of one turn in the part called constant, in seconds."""
    steps: PositiveInt = 12
    """Policy steps whose rollouts the part called workload measures, on all ranks."""


class BenchTrain(WithOverrides):
    """Measure how much faster whole RL steps are with TLT than without speculation.

    The runs take turns and stay in run.out_dir; more --steps continue them.

    Every key of the configuration can be overridden, as for tlt train.
    """

    config: Config
    """TOML configuration, or the name of a recipe such as countdown."""
    out: Stem
    """Where the results go: OUT.json and OUT.md."""
    variants: Names = ("tlt", "frozen")
    """What to compare with off: tlt (the configuration as it is), frozen (without training the drafter)."""
    steps: PositiveInt = 20
    """RL steps of every run."""
    minutes: PositiveFloat = 60.0
    """Time limit in minutes: no step begins that would not end within it."""


def rollout(options: BenchRollout) -> Record:
    """Measures (see bench/rollout.py); returns the ratios over off, by measurement."""
    from tlt.bench.report import header, write_report
    from tlt.bench.rollout import constant, launch_workload, summary_line, to_markdown
    from tlt.bench.subject import Subject
    from tlt.drafter.drafting.hybrid import drafter_kinds
    from tlt.training.start import pin, preflight
    from tlt.tuning.tuner import make_tuner

    _check_words("--parts", options.parts, PARTS)
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(options.config, options.overrides)
    if "workload" in options.parts and config.rollout.speculation == "off":
        raise UserError("rollout.speculation: is off, so nothing can be compared; set it to adaptive, or leave workload out")
    for variant in options.variants:
        if variant != "beg-mab":
            make_tuner(variant, drafter_kinds(config.drafter.path is not None))
    config = pin(config)
    with show_busy("reading model and problems"):
        preflight(config)
    report: Record = {**header(config, _command("tlt bench rollout")), "measurements": []}

    def note(measured: Record) -> None:
        """Writes all measurements so far: a run that is cut off keeps what it has."""
        report["measurements"].append(measured)
        print(summary_line(measured), flush=True)
        write_report(options.out, report, to_markdown(report))

    if "constant" in options.parts:
        subject = Subject(config)
        for batch_size in options.batches:
            note(constant(subject, options.variants, batch_size, options.rounds, options.seconds))
    if "workload" in options.parts:
        note(launch_workload(config, options.steps))
    return {
        m["name"]: m.get("median_ratio") or {n: r["mean"] for n, r in m["ratios"].items()}
        for m in report["measurements"]
        if "ratios" in m or "median_ratio" in m
    }


def train(options: BenchTrain) -> Record:
    """Runs side by side (see bench/train.py); returns off's step time over each variant's. Stopped by the user, it reports what
    was measured and exits as a run does."""
    from tlt.bench.report import header, write_report
    from tlt.bench.train import FROZEN, OFF, Plan, launch_runs
    from tlt.bench.train_report import summarize, to_markdown
    from tlt.training.start import pin, preflight

    changes = {"tlt": {}, "frozen": FROZEN}
    _check_words("--variants", options.variants, tuple(changes))
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(options.config, options.overrides)
    if config.rollout.speculation == "off":
        raise UserError("rollout.speculation: is off, so nothing can be compared; set it to adaptive")
    if "frozen" in options.variants and not config.drafter.train:
        raise UserError("--variants: frozen differs from tlt only where drafter.train is true; set it, or leave frozen out")
    config = pin(config)
    with show_busy("reading model and problems"):
        preflight(config)
    plan = Plan({"off": OFF, **{name: changes[name] for name in options.variants}}, options.steps, options.minutes)
    code = launch_runs(config, plan)
    if code not in (0, 130, 143):
        raise SystemExit(code)
    report = {**header(config, _command("tlt bench train")), **summarize(config.run.out_dir, tuple(plan.runs))}
    write_report(options.out, report, to_markdown("Whole steps with and without TLT", report))
    if code:
        raise SystemExit(code)
    return {name: report["runs"][name]["ratios"]["off"]["mean"] for name in options.variants}


def _check_words(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for word in given:
        if word not in known:
            raise UserError(f"{option}: {word!r} is unknown; give some of {', '.join(known)}")


def _command(name: str) -> str:
    return " ".join([name, *sys.argv[3:]])
