"""Part `steps`: what passes between host and GPU in an engine step: waits, copies, launches, and the host's
share of the time.

waits       by the line that waits (torch.cuda.set_sync_debug_mode); a step needs one, for its tokens
launches    kernels, graphs and copies of a step, and the seconds that they run, by the profiler
host        seconds of a step, without profiler, less what the GPU ran: what launching and bookkeeping cost

A rehearsal counts waits on the pretended GPU of the tests.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.harness import Record, wait_for
from benchmarks.gpu.subjects import grown_subject, recipe
from tlt.base.types import Request
from tlt.engine.backend import RolloutBackend
from tlt.engine.own.engine import RolloutEngine

NUM_STEPS = 20
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIES = {"DtoH": "copies to the host", "HtoD": "copies to the GPU"}
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
)


def endless(request: Request) -> Request:
    """Returns a request whose response goes on for longer than is measured."""
    return replace(request, params=replace(request.params, stop_ids=(), max_tokens=2000))


def never_record(engine: RolloutBackend) -> None:
    """Turns CUDA graphs off, of the engine and of its drafter."""
    assert isinstance(engine, RolloutEngine)
    engine.graphs.is_on = False
    if (learned := engine.drafter.learned) is not None:
        learned.draft_cache.graphs.is_on = False


def waits_of(engine: RolloutBackend) -> dict[str, float]:
    """Returns the waits of a step by "file:line"."""
    found = Counter[str]()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(NUM_STEPS):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "synchroniz" in str(one.message):
            found["/".join(one.filename.split("/")[-2:]) + f":{one.lineno}"] += 1
    return {place: num / NUM_STEPS for place, num in found.most_common()}


def profile_of(engine: RolloutBackend) -> dict[str, Any]:
    """Returns launches, copies and waits of a step, and the seconds that kernels and copies ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    counts, busy = Counter[str](), 0.0
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy += event.time_range.elapsed_us() / 1e6
            counts[next((name for mark, name in COPIES.items() if mark in event.name), "other")] += 1
        elif event.name in LAUNCHES:
            counts["launches"] += 1
        elif event.name in WAITING_CALLS:
            counts["waits"] += 1
    return {"busy_seconds": busy / NUM_STEPS, **{name: num / NUM_STEPS for name, num in counts.items()}}


def seconds_of_steps(engine: RolloutBackend, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    wait_for(device)
    return (time.perf_counter() - began) / NUM_STEPS


def pretended(strategy: str, batch: int) -> dict[str, Any]:
    """Returns the waits and uploads of a step on the tests' pretended GPU."""
    import pytest

    tests = importlib.import_module("tests.unit.engine.own.test_crossings")
    with pytest.MonkeyPatch.context() as patch:
        found = tests.crossings_of_a_step(patch, strategy, batch)
    return {"waits_by_line": dict(found.down + found.stalls), "copies to the GPU": found.up.total()}


def main() -> None:
    record = Record.of_arguments()
    settings, device = record.settings, torch.device(record.settings["device"])
    if device.type == "cpu":
        for strategy in settings["strategies"]:
            record.append("steps", {"strategy": strategy, "batch": 8, **pretended(strategy, 8)})
        return
    made = grown_subject(recipe(settings, run__dtype="bfloat16"), settings["geometry"], device)
    record.add(lines=made.lines)
    for batch in settings["batches"]:
        for strategy in settings["strategies"]:
            for records in (False, True):
                engine = made.subject.engine(strategy, batch)
                if not records:
                    never_record(engine)
                engine.add(endless(request) for request in made.subject.requests(0, batch))
                for _ in range(15):
                    engine.step()
                measured = {"step_seconds": seconds_of_steps(engine, device), **profile_of(engine)}
                measured["waits_by_line"] = waits_of(engine)
                measured["host_share"] = max(1 - measured["busy_seconds"] / measured["step_seconds"], 0.0)
                record.append("steps", {"strategy": strategy, "batch": batch, "graphs": records, **measured})


if __name__ == "__main__":
    main()
