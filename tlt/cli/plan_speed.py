"""`tlt plan speed`: how long steps take with more replicas, and what TLT brings there. The simulation is tlt.simulate's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tlt.cli.options import ConfigFile, File, Folder, Numbers, WithOverrides
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.files import Record, check_output_file, with_folder, write_json
from tlt.kinds import NonNegativeFloat, PositiveInt, Tokens
from tlt.types import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from tlt.simulate.assumptions import Assumptions
    from tlt.simulate.expectation import Row

_MEDIAN_SHARE = 1 / 8


class PlanSpeed(WithOverrides):
    """Simulate steps of many replicas, and what each part of TLT brings there.

    tlt plan speed CONFIG [--replicas N,N] [--run RUN] [--section.key VALUE ...]

    The run's own code decides, under virtual time; nothing is generated.
    """

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    replicas: Numbers = (2, 8, 64)
    """Numbers of engines that share a step; each has as many responses as a rank of the configuration has. Hundreds take
    minutes."""
    run: Folder = None
    """Folder of a run that has measured lengths, costs and acceptance; none: a GPU-like cost curve and the options below."""
    median_tokens: Tokens | None = None
    """Without --run: half of the responses are longer; none: an eighth of sampling.max_tokens."""
    p95_tokens: Tokens | None = None
    """Without --run: one response in twenty would be longer; none: sampling.max_tokens, at which all are cut."""
    step_ms: Annotated[float, Field(ge=1e-6, le=1e6)] = 25.0
    """Without --run: milliseconds of a decoding step without speculation."""
    knee: Tokens = 512.0
    """Without --run: tokens in one forward up to which a step takes no longer."""
    rollout_share: Annotated[float, Field(ge=1e-3, le=1)] = 0.85
    """Without --run: share of a step that is rollout, without speculation, for the first of --replicas."""
    interference: NonNegativeFloat = 0.0
    """Share by which a busy replica's steps take longer when all others of its host do idle work."""
    steps: PositiveInt | None = None
    """Steps to simulate of each variant; none: fewer for more replicas."""
    out: File = None
    """JSON file to write all figures to."""


def speed(options: PlanSpeed) -> Record:
    """Prints the table with its assumptions; returns its figures."""
    if options.out is not None:
        check_output_file(options.out, "--out")
    config = load_config(options.config, options.overrides)
    from tlt.simulate.assumptions import GENERAL
    from tlt.simulate.expectation import expect

    assumed = assume(options, config)
    rows = [expect(assumed, num, num_problems(config, num), options.steps) for num in options.replicas]
    lines = [*assumed.lines, *GENERAL, steps_line(rows)]
    print_rows(rows, lines)
    figures = {"assumptions": lines, "rows": [dataclasses.asdict(row) for row in rows]}
    if options.out is not None:
        write_json(with_folder(options.out), figures)
    return {"replicas": {str(row.num_replicas): {v.variant: round(v.times_first, 2) for v in row.variants} for row in rows}}


def num_problems(config: Config, num_replicas: int) -> int:
    """Returns the problems of a step in which each replica has as many as a rank of the configuration."""
    from tlt.build.model import all_ranks

    return max(round(config.rollout.problems_per_step * num_replicas / all_ranks(config)), 1)


def assume(options: PlanSpeed, config: Config) -> Assumptions:
    """Returns what the options say to rest on."""
    from tlt.simulate.assumptions import LogNormalLengths
    from tlt.simulate.expectation import OFF, num_steps_for, simulate
    from tlt.simulate.gpu import GpuSeconds, assume_gpu, with_rest
    from tlt.simulate.recorded import assume_recorded, read_run

    if options.run is not None:
        return assume_recorded(read_run(options.run), config, options.interference)
    cap = config.sampling.max_tokens
    median, p95 = options.median_tokens or cap * _MEDIAN_SHARE, options.p95_tokens or float(cap)
    if not median < p95:
        raise UserError(f"--p95-tokens: is {p95:g}, not above the median of {median:g}; give more, or lower the median")
    lengths = LogNormalLengths(median, p95, cap, config.run.seed)
    seconds = GpuSeconds(options.step_ms / 1000, options.knee)
    assumed = assume_gpu(config, seconds, lengths, options.interference)
    first = options.replicas[0]
    off = simulate(assumed, OFF, first, num_problems(config, first), range(num_steps_for(first)))
    mean = sum(step.rollout_seconds for step in off) / len(off)
    return with_rest(assumed, mean * (1 / options.rollout_share - 1))


def steps_line(rows: list[Row]) -> str:
    """Returns how many steps were simulated, for people."""
    from tlt.simulate.expectation import WARM_UP

    each = ", ".join(f"{row.num_replicas} replicas {row.num_steps}" for row in rows)
    return f"steps simulated of each variant, after up to {WARM_UP} before them: {each}"


def worth_lines(rows: list[Row]) -> list[str]:
    """Returns which use of idle time pays, for people, where there are several."""
    from tlt.simulate.expectation import ADAPTIVE

    lines = []
    for row in rows:
        worth = sorted(row.of(ADAPTIVE).worth.items(), key=lambda pair: -pair[1])
        each = ", ".join(f"{use} {net:+.4f}" for use, net in worth)
        lines.append(f"{row.num_replicas} replicas: {each} s")
    return lines


def print_rows(rows: list[Row], lines: list[str]) -> None:
    import rich.console

    from tlt.report.console import WIDTH

    console = rich.console.Console(width=WIDTH + 28, highlight=False, emoji=False, markup=False)
    console.print(to_table(rows))
    console.print("seconds by which steps become shorter for each that an idle replica spends:")
    for line in worth_lines(rows):
        console.print(f"- {line}", soft_wrap=True)
    console.print("assumed:")
    for line in lines:
        console.print(f"- {line}", soft_wrap=True)


def to_table(rows: list[Row]) -> Table:
    """Returns a table with a row for each number of replicas: every variant's seconds, and how many times faster it is than the
    first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("replicas", "responses", *(one.variant for one in rows[0].variants), "TLT: idle", "… training"):
        table.add_column(name, justify="right")
    for row in rows:
        first, *others = row.variants
        tlt = row.tlt
        cells = [f"{one.seconds:,.1f} s {one.times_first:.2f}x" for one in others]
        idle = f"{tlt.idle_seconds / row.num_replicas / tlt.rollout_seconds:.0%}"
        about = f"{row.num_replicas}", f"{row.num_responses}", f"{first.seconds:,.1f} s"
        table.add_row(*about, *cells, idle, f"{tlt.trained_share:.0%}")
    return table
