"""Part `training`: RL steps of the recipe in the sizes of a large model, and the memory that they take beside
what `tlt plan memory` says.

The first step warms up, the last one is reported: seconds by phase. Learning rates are almost 0
(grown.py).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.harness import Record
from benchmarks.gpu.subjects import geometry_of, recipe
from benchmarks.grown import HELD_STILL, grown_config, plan_growth
from benchmarks.subject import plan_subject
from benchmarks.train_report import phase_seconds, read_spans
from tlt.apps.plan.memory import ALWAYS, MemoryPlan, plan_memory
from tlt.base.config.schema import Config
from tlt.training.build.layout import join_ranks
from tlt.training.launch.signals import StopRequest
from tlt.training.loop import advance
from tlt.training.ranks.world import shutdown
from tlt.training.rollout.work_queue import connect_work_queue
from tlt.training.run import Run


def configuration(settings: dict[str, Any], folder: Path) -> Config:
    """Returns that of a run of few responses, whose weights stay as they are."""
    held = {key.replace(".", "__"): value for key, value in HELD_STILL.items()}
    sizes = {
        "run__dtype": settings["dtype"],
        "run__out_dir": folder / "run",
        "run__num_steps": settings["steps"],
        "run__time_limit_minutes": 60,
        "rollout__problems_per_step": settings["problems"],
        "rollout__samples_per_problem": settings["samples"],
        "sampling__max_tokens": settings["max_tokens"],
        "algorithm__tokens_per_micro_batch": settings["tokens_per_micro_batch"],
        "evaluation__num_problems": 0,
        "parallel__checkpoint_activations": "true",
    }
    return recipe(
        settings,
        **sizes,
        **held,
        **{key.replace(".", "__"): value for key, value in settings["keys"].items()},
    )


def planned(plan: MemoryPlan) -> dict[str, Any]:
    gib = 2**30
    return {
        "peak_gib": plan.peak[1] / gib,
        "phase": plan.peak[0],
        "by_phase": {phase: plan.total(phase) / gib for phase in ALWAYS},
        "parts": {term.name: term.num_bytes / gib for term in plan.terms},
    }


def measured_memory() -> dict[str, float]:
    """Returns GiB: allocated at most by PyTorch, reserved by it, and taken of the GPU now."""
    free, total = torch.cuda.mem_get_info()
    sizes = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "taken": total - free,
    }
    return {name: size / 2**30 for name, size in sizes.items()}


def take_steps(record: Record, config: Config) -> None:
    stop = StopRequest()
    world = join_ranks(config)
    queue = connect_work_queue(world.store, world.rank, world.world_size, timeout=world.timeout_seconds)
    run = Run(config, world, stop, queue, prints=False)
    try:
        for step in range(config.run.num_steps):
            began = time.perf_counter()
            phase = advance(run)
            lengths = [len(rollout.token_ids) for rollout in phase.rollouts]
            done = {
                "step": step,
                "seconds": time.perf_counter() - began,
                "tokens": sum(lengths),
                "longest": max(lengths),
            }
            memory = measured_memory() if world.device.type == "cuda" else None
            record.append("steps", {**done, "accept_length": phase.stats.accept_length, "memory": memory})
        run.timeline.flush()
        record.add(phase_seconds=phase_seconds(read_spans(run.out_dir)))
    finally:
        run.close()
    del run
    shutdown(world)


def main() -> None:
    record = Record.of_arguments()
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(record.settings, folder)
        growth = plan_growth(config, geometry_of(record.settings["geometry"], folder))
        subject = replace(plan_subject(config), model=growth.grown.config, drafter=growth.drafter_shape)
        record.add(planned=planned(plan_memory(subject)))
        began = time.perf_counter()
        with grown_config(config, growth, keep=folder / "grown") as (grown, described):
            record.add(lines=described["geometry"]["lines"], growing_seconds=time.perf_counter() - began)
            take_steps(record, grown)


if __name__ == "__main__":
    main()
