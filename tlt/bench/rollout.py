"""How much faster is the rollout with speculation? Two engines side by side in the same processes, in turns.

    step 0:  off ─▶ on        the same problems, the same keys, hence the same tokens (checked);
    step 1:  on ─▶ off        the ratio of their seconds is what is measured, step by step
    …

`workload` runs a configuration's own rollout phases on all ranks, drafter training in idle time included. `constant` keeps
one engine at a fixed batch size. Both give every measurement, the median ratio and its spread.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tlt import __version__
from tlt.config import Config
from tlt.distributed.collectives import World, init_process_group_from_env, shutdown
from tlt.distributed.coordinator import connect_coordinator
from tlt.phase import PhaseResult
from tlt.report.timeline import critical_path_share, read_spans
from tlt.rollout.engine import EngineStats, RolloutEngine
from tlt.train import Run, device_name, problems_of_step
from tlt.types import Problem, Request, Rollout, SamplingParams

if TYPE_CHECKING:
    from tlt.distributed.launch import StopRequest

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """One measurement: the same work without and with speculation."""

    num_tokens: int
    off_seconds: float
    on_seconds: float
    accept_length: float | None
    num_different: int
    """Responses whose tokens differ (float32: only at near-ties)."""

    @property
    def ratio(self) -> float:
        return self.off_seconds / self.on_seconds


@dataclass(frozen=True)
class Measurement:
    """`ratio` > 1: speculation is faster."""

    name: str
    pairs: tuple[Pair, ...]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median_ratio(self) -> float:
        return statistics.median(pair.ratio for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        ratios = sorted(pair.ratio for pair in self.pairs)
        lengths = [pair.accept_length for pair in self.pairs if pair.accept_length is not None]
        return {
            "name": self.name,
            "median_ratio": self.median_ratio,
            "ratio_range": [ratios[0], ratios[-1]],
            "ratio_of_sums": sum(p.off_seconds for p in self.pairs) / sum(p.on_seconds for p in self.pairs),
            "accept_length": statistics.mean(lengths) if lengths else None,
            "num_tokens": sum(p.num_tokens for p in self.pairs),
            "num_different": sum(p.num_different for p in self.pairs),
            **self.details,
            "pairs": [{**dataclasses.asdict(pair), "ratio": pair.ratio} for pair in self.pairs],
        }


def main(config_json: str, stop: StopRequest) -> None:
    """What every rank runs; rank 0 leaves the measurements in run.out_dir/bench.json. Options travel in the environment,
    since `launch` carries the configuration alone."""
    config = Config.from_json(config_json)
    options = json.loads(os.environ["TLT_BENCH_ROLLOUT"])
    torch.set_num_threads(config.run.threads_per_rank)
    world = init_process_group_from_env(device_name(config))
    measurements = [workload(config, world, stop, options["steps"])]
    if world.is_leader:
        (config.run.out_dir / "bench.json").write_text(json.dumps([m.to_json() for m in measurements]))
    shutdown(world)


def workload(config: Config, world: World, stop: StopRequest, num_steps: int) -> Measurement:
    """Rollout phases of the configuration, `num_steps` of them, in both ways; the policy stays as it is."""
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=600.0)
    plain: Changes = {"rollout": {"speculation": "off"}, "drafter": {"train": False}}
    runs: dict[str, Run] = {}
    for name, changes in (("on", {}), ("off", plain)):
        changed = _with(config, {**changes, "run": {"out_dir": config.run.out_dir / name}})
        runs[name] = Run(changed, world, stop, coordinator)
    params = runs["on"].sampling_params()
    pairs, idle, harvested = [], 0.0, 0.0
    for step in range(num_steps):
        problems = problems_of_step(runs["on"].problems, step, config.rollout.problems_per_step, config.run.seed)
        results: dict[str, PhaseResult] = {}
        for name in ("off", "on") if step % 2 == 0 else ("on", "off"):
            started = time.perf_counter()
            results[name] = runs[name].phase.run(problems, config.rollout.samples_per_problem, params, "rollout", step)
            runs[name].timeline.record("step", started, time.perf_counter())
        on, off = results["on"], results["off"]
        pairs.append(_pair(off.rollouts, on.rollouts, _generation_seconds(off), _generation_seconds(on), on.stats))
        idle, harvested = idle + on.idle_seconds, harvested + on.drafter_seconds
    for run in runs.values():
        run.timeline.flush()
        run.close()
    spans = read_spans(runs["on"].out_dir)
    details = {
        "idle_seconds": idle,
        "harvested_share": harvested / idle if idle else None,
        "drafter_training_on_critical_path": critical_path_share(spans, ("train drafter", "average drafters")),
    }
    return Measurement(f"workload of {config.task.name}, {world.world_size} ranks", tuple(pairs), details)


def constant(config: Config, stop: StopRequest, batch_size: int, num_responses: int, num_rounds: int) -> Measurement:
    """One engine kept at `batch_size` sequences until the requests run out; each round has requests of its own."""
    torch.set_num_threads(config.run.threads_per_rank)
    world = World(0, 1, 0, torch.device(device_name(config)), torch.distributed.HashStore(), None)
    run = Run(_with(config, {"run": {"num_ranks": 1}, "drafter": {"train": False}}), world, stop)
    on = run.engine
    off = RolloutEngine(run.model_config, dtype=on.model.dtype, device=on.device, max_batch_size=config.rollout.max_batch_size)
    off.load_policy(dict(run.policy.named_parameters()))
    params, pairs = run.sampling_params(), []
    for engine in (on, off):
        engine.scheduler.max_slots = batch_size
    for index in range(num_rounds + 1):  # the first warms up and is not counted
        requests = _requests(run.problems, params, num_responses, index)
        timed = {}
        for name, engine in (("off", off), ("on", on)) if index % 2 == 0 else (("on", on), ("off", off)):
            engine.stats = EngineStats()
            started = time.perf_counter()
            rollouts = sorted(engine.generate(requests), key=lambda r: (r.problem_id, r.sample_index))
            timed[name] = (rollouts, time.perf_counter() - started)
        if index:
            pairs.append(_pair(timed["off"][0], timed["on"][0], timed["off"][1], timed["on"][1], on.stats))
    run.close()
    return Measurement(f"constant batch {batch_size}", tuple(pairs))


def _requests(problems: Sequence[Problem], params: SamplingParams, num: int, step: int) -> list[Request]:
    chosen = problems_of_step(problems, step, num, seed=1)
    return [Request(problem.problem_id, 0, problem.prompt_ids, params, "rollout", step) for problem in chosen]


def _generation_seconds(phase: PhaseResult) -> float:
    """From the first replica's start to the last token of all."""
    return phase.last_token - min(replica.start for replica in phase.replicas)


def _pair(off: Iterable[Rollout], on: Iterable[Rollout], off_seconds: float, on_seconds: float, stats: EngineStats) -> Pair:
    off, on = list(off), list(on)
    different = sum(a.token_ids != b.token_ids for a, b in zip(off, on, strict=True))
    return Pair(sum(len(r.token_ids) for r in on), off_seconds, on_seconds, stats.accept_length, different)


def _with(config: Config, changes: Changes) -> Config:
    values = config.model_dump()
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    return Config.model_validate(values)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def environment() -> dict[str, Any]:
    """Machine, commit and versions, without host names or paths."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = bool(
            subprocess.run(["git", "status", "--porcelain", "tlt"], capture_output=True, text=True, check=False).stdout.strip()
        )
    except (OSError, subprocess.CalledProcessError):
        commit, dirty = "unknown", False
    cpu = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        cpu = f"{names[0]}, {len(names)} cores" if names else cpu
    return {
        "tlt": __version__,
        "commit": commit + ("+changes" if dirty else ""),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def to_markdown(report: dict[str, Any]) -> str:
    rows = [
        "| measurement | off / on, median | range | accept length | tokens | different responses |",
        "|---|---|---|---|---|---|",
    ]
    for m in report["measurements"]:
        low, high = m["ratio_range"]
        accept = "–" if m["accept_length"] is None else f"{m['accept_length']:.2f}"
        rows.append(
            f"| {m['name']} | {m['median_ratio']:.2f} | {low:.2f} – {high:.2f} | {accept} | {m['num_tokens']:,} "
            f"| {m['num_different']} |"
        )
    machine = ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value)
    notes = [
        f"\n{m['name']}: {key.replace('_', ' ')} {value:.4f}"
        for m in report["measurements"]
        for key, value in m.items()
        if key in ("harvested_share", "drafter_training_on_critical_path") and value is not None
    ]
    return f"# Rollout with and without speculation\n\n`{report['command']}`\n\n{machine}\n\n" + "\n".join(rows + notes) + "\n"


def run_benchmark(
    config: Config,
    num_steps: int,
    batches: Sequence[int],
    num_responses: int,
    num_rounds: int,
    out: Path,
    command: str,
    on_result: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Everything, written to `out`.json and `out`.md; returns the report."""
    from tlt.distributed.launch import StopRequest, launch

    with tempfile.TemporaryDirectory() as folder:
        measurements = []
        inside = _with(config, {"run": {"out_dir": Path(folder) / "constant"}})
        for batch_size in batches:
            measurements.append(
                constant(inside, StopRequest(), batch_size, max(num_responses, 2 * batch_size), num_rounds).to_json()
            )
            on_result(measurements[-1])
        if num_steps:
            (Path(folder) / "workload").mkdir()
            inside = _with(config, {"run": {"out_dir": Path(folder) / "workload"}})
            os.environ["TLT_BENCH_ROLLOUT"] = json.dumps({"steps": num_steps})
            code = launch(inside.to_json(), config.run.num_ranks, "tlt.bench.rollout:main", config.run.threads_per_rank)
            if code:
                raise SystemExit(code)
            measurements += json.loads((Path(folder) / "workload" / "bench.json").read_text())
            on_result(measurements[-1])
    described = config.model_dump(mode="json")
    for section, key in (("run", "out_dir"), ("model", "path"), ("drafter", "path")):  # no paths of this machine
        described[section][key] = Path(str(described[section][key])).name
    report = {"command": command, "environment": environment(), "config": described, "measurements": measurements}
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(to_markdown(report))
    return report
