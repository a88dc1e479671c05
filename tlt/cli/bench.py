"""`tlt bench`: measures what speculation gains on a configuration, and writes OUT.json and OUT.md."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tlt.cli.engine import show_busy
from tlt.cli.options import ConfigFile, Names, Numbers, Options, WithOverrides, Written
from tlt.cli.summary import Summary
from tlt.config.load import load_config
from tlt.io.files import Record, check_output_file
from tlt.kinds import PositiveFloat, PositiveInt
from tlt.types import UserError

if TYPE_CHECKING:
    from tlt.config.schema import Config

Stem = Annotated[Path, Written("OUT")]
Size = Annotated[str | None, Written("NAME|FILE")]


class BenchOptions(Options):
    """The configuration to measure, and the files of the results."""

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    out: Stem
    """Where the results go: OUT.json and OUT.md."""
    geometry: Size = None
    """Grows model and drafter into the sizes of a larger model: a name such as qwen2.5-0.5b, or a Hugging
    Face config.json. What has grown generates the same tokens, each at the cost of the larger model."""


class BenchRollout(BenchOptions, WithOverrides):
    """Measure how much faster rollouts are with speculation than without, at batches that stay at one size.

    Every key of the configuration can be overridden, as for tlt train.
    """

    variants: Names = ("adaptive",)
    """Speculations to compare with off: adaptive, or fixed strategies such as 4x1x4 or ngram:8x1x8."""
    batches: Numbers = (1, 2, 4, 8, 16, 32)
    """Batch sizes to measure."""
    rounds: PositiveInt = 8
    """Number of turns of every variant at each batch size."""
    seconds: PositiveFloat = 2.0
    """Length of one turn in seconds."""


class BenchTrain(BenchOptions, WithOverrides):
    """Measure how much faster whole RL steps are with TLT than without speculation.

    The runs take turns and stay in run.out_dir; the same command with more --steps continues them. With
    --geometry learning rates are almost 0.

    Every key of the configuration can be overridden, as for tlt train.
    """

    variants: Names = ("tlt", "frozen")
    """Runs to compare with off: tlt (the configuration as it is), frozen (the drafter is not trained), ahead
    (with rollout.ahead = "adaptive")."""
    steps: PositiveInt = 20
    """RL steps of every run."""
    minutes: PositiveFloat = 60.0
    """Time limit in minutes: no step begins that would not end within it."""


def rollout(options: BenchRollout) -> Record:
    """Measures rollouts (bench/rollout.py); returns the ratios over off with their intervals, by
    measurement."""
    from tlt.bench.report import header, write_report
    from tlt.bench.rollout import constant, over_off, rollout_markdown
    from tlt.bench.subject import Subject
    from tlt.drafter.drafting.hybrid import drafter_kinds
    from tlt.tuning.tuner import make_tuner

    config = _load(options, options.overrides)
    for variant in options.variants:
        make_tuner(variant, drafter_kinds(config.drafter.path is not None))
    with _grown(config, options.geometry, num_engines=len(options.variants) + 1) as (config, geometry):
        measurements: list[Record] = []
        report = {**header(config, _command("tlt bench rollout")), **geometry, "measurements": measurements}
        subject = Subject(config)
        for batch_size in options.batches:
            measured = constant(subject, options.variants, batch_size, options.rounds, options.seconds)
            measurements.append(measured)
            print(over_off(measured), flush=True)
            # after each: a later one may be interrupted
            write_report(options.out, report, rollout_markdown(report))
    return {m["name"]: {name: _times(one) for name, one in m["ratios"].items()} for m in measurements}


def train(options: BenchTrain) -> Record:
    """Runs the variants in turns (bench/train.py); returns off's step time over each variant's. Where the
    user stops it, it reports what is measured so far and exits as a run does."""
    from tlt.bench.geometry import hold_still
    from tlt.bench.report import header, write_report
    from tlt.bench.train import OFF, VARIANTS, Plan, launch_runs
    from tlt.bench.train_report import summarize_runs, train_markdown

    for word in options.variants:
        if word not in VARIANTS:
            raise UserError(f"--variants: {word!r} is unknown; give some of {', '.join(VARIANTS)}")
    config = _load(options, options.overrides if options.geometry is None else hold_still(options.overrides))
    if config.rollout.speculation == "off":
        raise UserError("rollout.speculation: is off, so nothing can be compared; set it to adaptive")
    if "frozen" in options.variants and not config.drafter.train:
        what = "frozen differs from tlt only where drafter.train is true"
        raise UserError(f"--variants: {what}; set it, or leave frozen out")
    runs = {"off": OFF, **{name: VARIANTS[name] for name in options.variants}}
    keep = config.run.out_dir / "grown"
    with _grown(config, options.geometry, num_runs=len(runs), keep=keep) as (config, geometry):
        code = launch_runs(config, Plan(runs, options.steps, options.minutes))
    if code not in (0, 130, 143):
        raise SystemExit(code)
    summary = summarize_runs(config.run.out_dir, tuple(runs))
    report = {**header(config, _command("tlt bench train")), **geometry, **summary}
    write_report(options.out, report, train_markdown("Whole steps with and without TLT", report))
    if code:
        raise SystemExit(code)
    return {name: _times(report["runs"][name]["ratios"]["off"]) for name in options.variants}


def _load(options: BenchOptions, overrides: tuple[str, ...]) -> Config:
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    return load_config(options.config, overrides)


@contextlib.contextmanager
def _grown(
    config: Config, size: str | None, num_engines: int = 0, num_runs: int = 0, keep: Path | None = None
) -> Iterator[tuple[Config, Record]]:
    """Yields the configuration, with model and drafter grown where a size is given, and their lines for the
    report. Refuses what it can before anything grows or is measured.

    num_engines, num_runs: how many lie in memory side by side; 0: none.
    keep: folder that keeps the grown model; None: it is removed.
    """
    from tlt.bench.geometry import grown_config, plan_growth
    from tlt.bench.memory import plan_subject, refuse_engines, refuse_runs
    from tlt.training.start import pin, preflight

    config, growth = pin(config), None
    with show_busy("reading model and problems"):
        preflight(config, trains=size is None and num_runs > 0)
        run = plan_subject(config)
        if size is not None:
            growth = plan_growth(config, size)
            run = replace(run, model=growth.grown.config, drafter=growth.drafter_shape)
        if num_engines and config.rollout.engine == "tlt":
            refuse_engines(run, num_engines)
        if num_runs:
            refuse_runs(run, num_runs)
    with grown_config(config, growth, keep) as (config, geometry):
        for line in geometry.get("geometry", {}).get("lines", ()):
            print(line, flush=True)
        yield config, geometry


def _command(name: str) -> str:
    return " ".join([name, *sys.argv[3:]])


def _times(ratio: Record) -> Record:
    """Returns a ratio over off. low, high: its 95 % interval; None: one turn gives none."""
    low, high = ratio["low"], ratio["high"]
    return {
        "times": ratio["mean"],
        "low": low,
        "high": high,
        "is_resolved": low is not None and not low <= 1 <= high,
    }


def _written(one: Record) -> str:
    interval = "" if one["low"] is None else f" ({one['low']:.2f} – {one['high']:.2f})"
    return f"{one['times']:.2f}×{interval}" + ("" if one["is_resolved"] else ", not resolved")


def summarize_rollouts(record: Record) -> Summary:
    """Returns the summary for people: the highest ratio whose interval excludes 1. Ratios below 1 are the
    highest only where none is open."""
    found = [(one, variant, name) for name, by in record.items() for variant, one in by.items()]
    resolved = [(one["times"], variant, name) for one, variant, name in found if one["is_resolved"]]
    best = max(resolved, default=(0.0, "", ""))
    if best[0] > 1 or len(resolved) == len(found):
        told = f"at most {best[0]:.2f}× ({best[1]}, {best[2]})"
    else:
        told = "not resolved; more --rounds narrow the intervals"
    rows = {
        name: "  ".join(f"{variant} {_written(one)}" for variant, one in by.items())
        for name, by in record.items()
    }
    return Summary(f"rollouts, times as fast as off: {told}", rows)


def summarize_steps(record: Record) -> Summary:
    """Returns the summary for people."""
    times = (
        f"{variant} " + (f"{one['times']:.2f}×" if one["is_resolved"] else "not resolved")
        for variant, one in record.items()
    )
    rows = {variant: _written(one) for variant, one in record.items()}
    return Summary(f"steps, times as fast as off: {', '.join(times)}", rows)
