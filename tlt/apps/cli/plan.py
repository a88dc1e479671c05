"""`tlt plan memory`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from tlt.apps.cli.options import ConfigFile, File, WithOverrides
from tlt.apps.cli.summary import Summary
from tlt.base.config.load import load_config
from tlt.base.io.files import Record, check_output_file, with_folder, write_json
from tlt.base.value_types import Gib, NonNegativeInt, Processes

if TYPE_CHECKING:
    from tlt.apps.plan.memory import MemoryPlan
    from tlt.apps.plan.sizes import PlannedRun

WIDE = 140
"""Columns in a pipe or file, independent of any terminal."""


class PlanMemory(WithOverrides):
    """Show how much memory a run takes on each device, part by part, and whether it fits.

    tlt plan memory CONFIG [--device-gib N] [--section.key VALUE ...]

    Only the model's config.json is read, no weights.
    """

    config: ConfigFile
    """TOML configuration, or the name of a recipe such as countdown."""
    device_gib: Gib | None = None
    """Memory in GiB of a GPU, or of the machine where run.device is cpu; by default this machine's."""
    ranks: Processes | None = None
    """Number of ranks on all machines; by default run.num_ranks, on one machine."""
    prompt_tokens: NonNegativeInt = 1024
    """Tokens of the longest prompt."""
    out: File = None
    """JSON file to write the parts to."""


def memory(options: PlanMemory) -> Record:
    check_output_file(options.out, "--out")
    run = planned_run(options)
    from tlt.apps.plan.fit import judge
    from tlt.apps.plan.memory import ALWAYS, plan_memory
    from tlt.apps.plan.sizes import GIB

    plan, verdict = plan_memory(run), judge(run)
    print_plan(run, plan)
    figures: Record = {
        "fits": verdict.fits,
        "verdict": verdict.line,
        "device_gib": None if run.rank_bytes is None else run.rank_bytes / GIB,
        "needed_gib": plan.needed / GIB,
        "peak_gib": {phase: plan.total(phase) / GIB for phase in ALWAYS},
        "policy": "fsdp" if run.is_sharded else "replicate",
        "ranks": run.num_ranks,
    }
    if options.out is not None:
        parts = [asdict(term) | {"gib": term.num_bytes / GIB} for term in plan.terms]
        write_json(with_folder(options.out), figures | {"parts": parts})
    return figures


def planned_run(options: PlanMemory) -> PlannedRun:
    config = load_config(options.config, options.overrides)
    import torch

    from tlt.apps.plan.sizes import GIB, PlannedRun
    from tlt.base.io.hub import resolve_description
    from tlt.drafter.formats.folder import load_shape
    from tlt.engine.build.model import described_model
    from tlt.engine.memory import machine_bytes
    from tlt.training.build.ranks import all_ranks, local_ranks

    model = described_model(config)
    path, device, has_gpu = config.drafter.path, config.run.device, torch.cuda.is_available()
    drafter = None if path is None else load_shape(resolve_description(path), model)
    is_gpu = device == "cuda" or (device == "auto" and (has_gpu or options.device_gib is not None))
    if options.device_gib is not None:
        num_bytes: int | None = int(options.device_gib * GIB)
    elif is_gpu:
        num_bytes = torch.cuda.get_device_properties(0).total_memory if has_gpu else None
    else:
        num_bytes = machine_bytes()
    num_ranks = options.ranks or all_ranks(config)
    num_sharing = 1 if is_gpu else min(local_ranks(config), num_ranks)
    rank_bytes = None if num_bytes is None else num_bytes // num_sharing
    return PlannedRun(
        config, model, drafter, num_ranks, is_gpu, rank_bytes, options.prompt_tokens, num_sharing
    )


def print_plan(run: PlannedRun, plan: MemoryPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    from tlt.apps.plan.memory import ALWAYS
    from tlt.apps.plan.sizes import GIB

    layout = "sharded (FSDP2)" if run.is_sharded else "replicated"
    ranks = f"{run.num_ranks} rank(s), policy {layout}"
    table = Table(box=None, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for phase in ALWAYS:
        table.add_column(phase, justify="right", no_wrap=True)
    table.add_column("how")
    for term in plan.terms:
        cells = (f"{term.num_bytes / GIB:.2f}" if phase in term.phases else "" for phase in ALWAYS)
        table.add_row(term.name, *cells, term.how)
    table.add_row("total", *(f"{plan.total(phase) / GIB:.2f}" for phase in ALWAYS), "")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    console.print(f"memory of {'a GPU' if run.is_gpu else 'a rank'} in GiB: {run.config.model.path}, {ranks}")
    console.print(table)


def summarize(record: Record) -> Summary:
    return Summary(record["verdict"], {})
