"""`tlt plan memory`: what a run takes on each device, before anything is loaded. The arithmetic is tlt.plan's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tlt.cli.options import ConfigFile, File, WithOverrides
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.files import Record, check_output_file, with_folder, write_json
from tlt.kinds import Gib, NonNegativeInt, Processes

if TYPE_CHECKING:
    from rich.table import Table

    from tlt.plan.fit import Run, Verdict
    from tlt.plan.memory import MemoryPlan
    from tlt.plan.subject import Place

GIB = 2**30


class PlanMemory(WithOverrides):
    """Show what a run takes on each device, part by part, and whether it fits.

    tlt plan memory CONFIG [--device-gib N] [--section.key VALUE ...]

    Of the model only config.json is read.
    """

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    device_gib: Gib | None = None
    """Memory of a GPU in GiB, or of the machine where run.device is cpu; none: of what is found here."""
    ranks: Processes | None = None
    """Ranks of all machines; none: run.num_ranks, as on a single machine."""
    prompt_tokens: NonNegativeInt = 1024
    """Tokens of the longest prompt."""
    out: File = None
    """JSON file to write the parts to."""


def memory(options: PlanMemory) -> Record:
    """Prints the table and the verdict; returns their figures."""
    if options.out is not None:
        check_output_file(options.out, "--out")
    run = read_run(options)
    from tlt.plan.fit import judge

    plan, verdict = run.plan(), judge(run)
    figures = to_record(run, plan, verdict)
    print_plan(run, plan, verdict)
    if options.out is not None:
        write_json(with_folder(options.out), figures)
    return {key: value for key, value in figures.items() if key != "parts"}


def read_run(options: PlanMemory) -> Run:
    """Returns the run that the options name."""
    config = load_config(options.config, options.overrides)
    from tlt.drafter.formats.folder import load_shape
    from tlt.hub import resolve_description
    from tlt.models.hf_config import load_model_config
    from tlt.plan.fit import Run

    model = load_model_config(resolve_description(config.model.path, config.model.revision))
    path = config.drafter.path
    drafter = None if path is None else load_shape(resolve_description(path), model)
    return Run(config, model, drafter, find_machine(config, options))


def find_machine(config: Config, options: PlanMemory) -> Place:
    """Returns the devices that the options name, or those that are here."""
    import torch

    from tlt.build.model import local_ranks
    from tlt.distributed.place import read_number
    from tlt.engine.memory import machine_bytes
    from tlt.plan.subject import Place

    has_gpu = torch.cuda.is_available()
    is_gpu = config.run.device == "cuda" or (config.run.device == "auto" and (has_gpu or options.device_gib is not None))
    if options.device_gib is not None:
        device_bytes: int | None = int(options.device_gib * GIB)
    elif is_gpu:
        device_bytes = torch.cuda.get_device_properties(0).total_memory if has_gpu else None
    else:
        device_bytes = machine_bytes()
    num_local = local_ranks(config)
    num_ranks = options.ranks or max(read_number(os.environ, "WORLD_SIZE", default=1), num_local)
    return Place(num_ranks, num_local, is_gpu, False, device_bytes, options.prompt_tokens)


def to_record(run: Run, plan: MemoryPlan, verdict: Verdict) -> dict[str, Any]:
    """Returns all figures; sizes are in GiB."""
    from tlt.plan.memory import PHASES

    place = run.place
    return {
        "fits": verdict.fits,
        "verdict": verdict.line,
        "missing": list(verdict.missing),
        "device_gib": None if place.rank_bytes is None else place.rank_bytes / GIB,
        "needed_gib": plan.needed / GIB,
        "peak_gib": {phase: plan.total(phase) / GIB for phase in PHASES},
        "policy": "fsdp" if place.is_sharded else "replicate",
        "ranks": place.num_ranks,
        "parts": [
            {"name": part.name, "gib": part.num_bytes / GIB, "phases": list(part.phases), "how": part.how}
            for part in plan.parts
        ],
    }


def print_plan(run: Run, plan: MemoryPlan, verdict: Verdict) -> None:
    """Prints a table with a column for each phase, and the verdict below it."""
    import rich.console

    from tlt.report.console import WIDTH

    place = run.place
    layout = "sharded (FSDP2)" if place.is_sharded else "replicated"
    device = "a GPU" if place.is_gpu else "a rank"
    console = rich.console.Console(width=None if _is_terminal() else WIDTH + 28, highlight=False, emoji=False, markup=False)
    console.print(f"memory of {device} in GiB: {run.config.model.path}, {place.num_ranks} rank(s), policy {layout}")
    console.print(to_table(plan))
    console.print(verdict.line, soft_wrap=True)
    for line in verdict.missing:
        console.print(f"missing: {line}", soft_wrap=True)


def to_table(plan: MemoryPlan) -> Table:
    from rich.table import Table

    from tlt.plan.memory import PHASES

    table = Table(box=None, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right", width=8)
    table.add_column("how", style="dim", overflow="fold")
    for part in plan.parts:
        cells = [f"{part.num_bytes / GIB:.2f}" if not part.phases or phase in part.phases else "" for phase in PHASES]
        table.add_row(part.name, *cells, part.how)
    table.add_row("total", *(f"{plan.total(phase) / GIB:.2f}" for phase in PHASES), "", style="bold")
    return table


def _is_terminal() -> bool:
    import sys

    return sys.stdout.isatty()
