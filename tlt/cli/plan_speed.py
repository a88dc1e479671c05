"""`tlt plan speed`: computes step times with more replicas, and the gain of drafts and of moving
responses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tlt.cli.options import ConfigFile, File, Folder, Numbers, WithOverrides
from tlt.cli.summary import Summary
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.io.files import Record, check_output_file, with_folder, write_json
from tlt.kinds import PositiveInt, Tokens
from tlt.types import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from tlt.plan.recorded import RecordedRun
    from tlt.plan.speed import Assumed, Expected, Row

_MEDIAN_SHARE = 1 / 8


class PlanSpeed(WithOverrides):
    """Compute how long steps of many replicas take, with and without drafts.

    tlt plan speed CONFIG [--replicas N,N] [--run RUN] [--section.key VALUE ...]

    Plain arithmetic on lengths, step costs and acceptance; nothing is generated. The first line says whose
    costs and acceptance the factors are of: those of --run, or the TLT paper's model.
    """

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    replicas: Numbers = (2, 8, 64)
    """Numbers of engines that share a step; each has as many responses as a rank of the configuration."""
    run: Folder = None
    """Folder of a run whose measured lengths, costs and acceptance are used; by default a cost curve like a
    GPU's and the options that begin with "Without --run"."""
    median_tokens: Tokens | None = None
    """Without --run: median length of a response in tokens; by default an eighth of sampling.max_tokens."""
    p95_tokens: Tokens | None = None
    """Without --run: 95th percentile of the length of a response that is not cut off, in tokens; by default
    sampling.max_tokens."""
    step_ms: Annotated[float, Field(ge=1e-6, le=1e6)] = 25.0
    """Without --run: milliseconds of a decoding step without speculation."""
    knee: Tokens = 512.0
    """Without --run: tokens in one forward up to which a step takes no longer."""
    rollout_share: Annotated[float, Field(ge=1e-3, le=1)] = 0.85
    """Without --run: share of a policy step that its rollout takes, without speculation, for the first
    number of --replicas."""
    steps: PositiveInt = 8
    """Number of steps to average over; with --run at most as many as the run has kept of that size."""
    out: File = None
    """JSON file to write all figures to."""


def speed(options: PlanSpeed) -> Record:
    """Prints the table with its assumptions; returns its figures."""
    check_output_file(options.out, "--out")
    config = load_config(options.config, options.overrides)
    from tlt.plan.speed import GENERAL, expect

    assumed = assume(options, config)
    rows = [expect(assumed, num, _num_problems(config, num), options.steps) for num in options.replicas]
    lines = [*assumed.lines, *GENERAL]
    print_rows(rows, assumed.source, lines)
    if options.out is not None:
        figures = {
            "factors_of": assumed.source,
            "assumptions": lines,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        write_json(with_folder(options.out), figures)
    times = {
        str(row.num_replicas): {one.variant: round(one.times, 2) for one in row.variants} for row in rows
    }
    return {"factors_of": assumed.source, "replicas": times}


def _num_problems(config: Config, num_replicas: int) -> int:
    """Returns the problems of a step in which each replica has as many as a rank of the configuration."""
    from tlt.assembly.ranks import all_ranks

    return max(round(config.rollout.problems_per_step * num_replicas / all_ranks(config)), 1)


def assume(options: PlanSpeed, config: Config) -> Assumed:
    """Returns the assumptions: those that a run has measured, or those of the options."""
    from tlt.plan.recorded import assume_recorded
    from tlt.plan.speed import GpuPace, assume_gpu, expect, with_rest

    if options.run is not None:
        return assume_recorded(run_in(options.run), config)
    cap = config.sampling.max_tokens
    median, p95 = options.median_tokens or cap * _MEDIAN_SHARE, options.p95_tokens or float(cap)
    if not median < p95:
        what = f"is {p95:g}, not above the median of {median:g}"
        raise UserError(f"--p95-tokens: {what}; give more, or lower the median")
    rollouts = assume_gpu(config, GpuPace(options.step_ms / 1000, options.knee), median, p95)
    first = options.replicas[0]
    off, *_ = expect(rollouts, first, _num_problems(config, first), options.steps).variants
    return with_rest(rollouts, off.rollout_seconds * (1 / options.rollout_share - 1))


def run_in(folder: Path) -> RecordedRun:
    """Returns what a run has recorded in its folder and in its latest checkpoint."""
    from tlt.plan.recorded import read_run
    from tlt.saved.manifest import latest_checkpoint, read_manifest, verify_files

    if (checkpoint := latest_checkpoint(folder / "checkpoints")) is None:
        return read_run(folder, [])
    manifest = read_manifest(checkpoint)
    names = [f"rank-{rank:05d}.json" for rank in range(manifest.num_ranks)]
    verify_files(checkpoint, manifest, names)
    return read_run(folder, [checkpoint / name for name in names])


def print_rows(rows: list[Row], source: str, lines: list[str]) -> None:
    """Prints the table with the source of its factors, and the assumptions below it."""
    import rich.console

    from tlt.report.console import WIDTH

    is_log = not sys.stdout.isatty()
    width = WIDTH + 28 if is_log else None
    console = rich.console.Console(width=width, highlight=False, emoji=False, markup=False)
    console.print(f"factors of {source}", soft_wrap=is_log)
    console.print(to_table(rows))
    console.print("assumed:")
    for line in lines:
        console.print(f"- {line}", soft_wrap=is_log)


def to_table(rows: list[Row]) -> Table:
    """Returns a table with a row for each number of replicas: every variant's seconds, and its speed over the
    first variant's with its range."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("replicas", "responses", *(one.variant for one in rows[0].variants), "TLT: idle"):
        table.add_column(name, justify="right")
    for row in rows:
        first, *others = row.variants
        last = row.variants[-1]
        idle = f"{last.idle_seconds / row.num_replicas / last.rollout_seconds:.0%}"
        about = f"{row.num_replicas}", f"{row.num_responses}", f"{first.seconds:,.1f} s"
        table.add_row(*about, *map(_cell, others), idle)
    return table


def _cell(one: Expected) -> str:
    return f"{one.seconds:,.1f} s {one.times:.2f}x ({one.times_low:.2f} to {one.times_high:.2f})"


def summarize(record: Record) -> Summary:
    """Returns the summary for people: the last row's factors; the table above has all."""
    num_replicas, times = list(record["replicas"].items())[-1]
    first, *others = times
    factors = ", ".join(f"{name} {times[name]:.2f}×" for name in others)
    headline = f"steps of {num_replicas} replicas, times as fast as {first}: {factors}"
    return Summary(headline, {"factors of": record["factors_of"]})
