"""`tlt bench`: what to measure of a configuration, and where to. How it is measured is tlt.bench's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tlt.cli.engine import show_busy
from tlt.cli.options import ConfigFile, Names, Numbers, WithOverrides, Written
from tlt.config.load import load_config
from tlt.files import Record, check_output_file
from tlt.kinds import PositiveFloat, PositiveInt
from tlt.types import UserError

if TYPE_CHECKING:
    from tlt.bench.geometry import Growth
    from tlt.config.schema import Config

Stem = Annotated[Path, Written("OUT")]
Size = Annotated[str | None, Written("NAME|FILE")]
PARTS = ("constant", "workload")


class BenchRollout(WithOverrides):
    """Measure how much faster rollouts are with speculation than without.

    Every key of the configuration can be overridden, as for tlt train.
    """

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    out: Stem
    """Where the results go: OUT.json and OUT.md."""
    geometry: Size = None
    """Grow model and drafter into the sizes of a large one, which then generates the very same tokens at its price: a name such
    as qwen2.5-0.5b, or a Hugging Face config.json."""
    parts: Names = ()
    """What to measure: constant (batches that stay at one size), workload (the configuration's own phases); left out, both, and
    constant alone with --geometry."""
    variants: Names = ("adaptive",)
    """What to compare with off: adaptive, fixed strategies such as 4x1x4 or ngram:8x1x8."""
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

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    out: Stem
    """Where the results go: OUT.json and OUT.md."""
    geometry: Size = None
    """Grow model and drafter into the sizes of a large one, such as qwen2.5-0.5b or a Hugging Face config.json, whose steps are
    then measured, with learning rates of almost 0. They stay in run.out_dir."""
    variants: Names = ("tlt", "frozen")
    """What to compare with off: tlt (the configuration as it is), frozen (without training the drafter)."""
    steps: PositiveInt = 20
    """RL steps of every run."""
    minutes: PositiveFloat = 60.0
    """Time limit in minutes: no step begins that would not end within it."""


def rollout(options: BenchRollout) -> Record:
    """Measures (see bench/rollout.py); returns the ratios over off, by measurement."""
    from tlt.bench.geometry import grown_config
    from tlt.bench.report import header, write_report
    from tlt.bench.rollout import constant, launch_workload, summary_line, to_markdown
    from tlt.bench.subject import Subject
    from tlt.drafter.drafting.hybrid import drafter_kinds
    from tlt.training.start import pin
    from tlt.tuning.tuner import make_tuner

    parts = options.parts or (PARTS if options.geometry is None else PARTS[:1])
    _check_words("--parts", parts, PARTS)
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    config = load_config(options.config, options.overrides)
    if "workload" in parts and config.rollout.speculation == "off":
        raise UserError("rollout.speculation: is off, so nothing can be compared; set it to adaptive, or leave workload out")
    for variant in options.variants:
        make_tuner(variant, drafter_kinds(config.drafter.path is not None))
    measurements: list[Record] = []
    config = pin(config)
    num_engines = len(options.variants) + 1 if "constant" in parts else 0
    growth = _prepare(config, options.geometry, num_engines, num_runs=2 if "workload" in parts else 0)
    with grown_config(config, growth) as (config, geometry):
        _print_lines(geometry)
        report: Record = {**header(config, _command("tlt bench rollout")), **geometry, "measurements": measurements}

        def note(measured: Record) -> None:
            """Writes all measurements so far: a run that is cut off keeps what it has."""
            measurements.append(measured)
            print(summary_line(measured), flush=True)
            write_report(options.out, report, to_markdown(report))

        if "constant" in parts:
            subject = Subject(config)
            for batch_size in options.batches:
                note(constant(subject, options.variants, batch_size, options.rounds, options.seconds))
        if "workload" in parts:
            note(launch_workload(config, options.steps))
    return {
        m["name"]: m.get("median_ratio") or {n: r["mean"] for n, r in m["ratios"].items()}
        for m in measurements
        if "ratios" in m or "median_ratio" in m
    }


def train(options: BenchTrain) -> Record:
    """Runs side by side (see bench/train.py); returns off's step time over each variant's. Stopped by the user, it reports what
    was measured and exits as a run does."""
    from tlt.bench.geometry import grown_config, hold_still
    from tlt.bench.report import header, write_report
    from tlt.bench.train import FROZEN, OFF, Plan, launch_runs
    from tlt.bench.train_report import summarize, to_markdown
    from tlt.training.start import pin

    changes = {"tlt": {}, "frozen": FROZEN}
    _check_words("--variants", options.variants, tuple(changes))
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    overrides = options.overrides if options.geometry is None else hold_still(options.overrides)
    config = load_config(options.config, overrides)
    if config.rollout.speculation == "off":
        raise UserError("rollout.speculation: is off, so nothing can be compared; set it to adaptive")
    if "frozen" in options.variants and not config.drafter.train:
        raise UserError("--variants: frozen differs from tlt only where drafter.train is true; set it, or leave frozen out")
    config = pin(config)
    plan = Plan({"off": OFF, **{name: changes[name] for name in options.variants}}, options.steps, options.minutes)
    growth = _prepare(config, options.geometry, num_engines=0, num_runs=len(plan.runs))
    with grown_config(config, growth, keep=config.run.out_dir / "grown") as (config, geometry):
        _print_lines(geometry)
        code = launch_runs(config, plan)
    if code not in (0, 130, 143):
        raise SystemExit(code)
    summary = summarize(config.run.out_dir, tuple(plan.runs))
    report = {**header(config, _command("tlt bench train")), **geometry, **summary}
    write_report(options.out, report, to_markdown("Whole steps with and without TLT", report))
    if code:
        raise SystemExit(code)
    return {name: report["runs"][name]["ratios"]["off"]["mean"] for name in options.variants}


def _prepare(config: Config, geometry: str | None, num_engines: int, num_runs: int) -> Growth | None:
    """Refuses what can be refused before anything grows or is measured. Returns what is to grow; None: nothing. num_engines,
    num_runs: that will be compared side by side, 0: none."""
    from tlt.bench.geometry import plan_growth
    from tlt.bench.memory import plan_subject, refuse_engines, refuse_runs
    from tlt.training.start import preflight

    with show_busy("reading model and problems"):
        preflight(config, trains=geometry is None and num_runs > 0)
        run, growth = plan_subject(config), None
        if geometry is not None:
            growth = plan_growth(config, geometry)
            run = replace(run, model=growth.grown.config, drafter=growth.drafter_shape)
        if num_engines and config.rollout.engine == "tlt":
            refuse_engines(run, num_engines)
        if num_runs:
            refuse_runs(run, num_runs)
    return growth


def _print_lines(geometry: Record) -> None:
    for line in geometry.get("geometry", {}).get("lines", ()):
        print(line, flush=True)


def _check_words(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for word in given:
        if word not in known:
            raise UserError(f"{option}: {word!r} is unknown; give some of {', '.join(known)}")


def _command(name: str) -> str:
    return " ".join([name, *sys.argv[3:]])
