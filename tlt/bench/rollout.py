"""`tlt bench rollout`: measures a configuration's rollout with speculation against the same rollout without.

    constant   engines kept at one batch size, off against the variants, in turns          (measure.py)
    workload   the configuration's own rollout phases on all ranks, idle time and drafter training included

Speculation changes no token, so both sides of a comparison do the same work (checked).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.bench.measure import Ratio, constant_batch
from tlt.bench.report import Changes, header, number, provenance, ratio_text, table, with_changes, write_report
from tlt.bench.subject import Subject
from tlt.config.schema import Config
from tlt.distributed.work_queue import connect_coordinator
from tlt.distributed.world import World, shutdown
from tlt.engine.stats import EngineStats
from tlt.report.timeline import critical_path_share, read_spans
from tlt.spans import SpanName
from tlt.training.phase import PhaseResult
from tlt.training.problems import problems_of_step
from tlt.training.run import Run, join_ranks
from tlt.types import Rollout

if TYPE_CHECKING:
    from tlt.distributed.signals import StopRequest

PARTS = ("constant", "workload")


@dataclass(frozen=True)
class Options:
    """The extent of `tlt bench rollout`.

    parts: some of PARTS.
    variants, batches, rounds, seconds: of the part constant. Each variant (adaptive, beg-mab or a fixed strategy) is compared
        with off at each batch size, in so many rounds with a stretch of so many seconds.
    steps: rollout phases of the part workload.
    """

    parts: tuple[str, ...]
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    seconds: float
    steps: int
    out: Path


def run_benchmark(config: Config, options: Options, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures all parts and returns the report. OUT.json and OUT.md are written after each measurement, so that a run which is
    cut off keeps what it has."""
    report: dict[str, Any] = {**header(config, command), "measurements": []}

    def done(measured: dict[str, Any]) -> None:
        report["measurements"].append(measured)
        say(summary_line(measured))
        write_report(options.out, report, to_markdown(report))

    if "constant" in options.parts:
        subject = Subject(config)
        for batch_size in options.batches:
            done(constant(subject, options, batch_size))
    if "workload" in options.parts:
        done(launch_workload(config, options.steps))
    return report


# ── constant batches ─────────────────────────────────────────────────────────────────────────────────────────────────


def constant(subject: Subject, options: Options, batch_size: int) -> dict[str, Any]:
    """Measures every variant's tokens per second over off's at this batch size."""
    engines = {name: subject.engine(name, batch_size) for name in ("off", *options.variants)}
    num = max(batch_size, 8)
    speeds = constant_batch(engines, lambda i: subject.requests(i, num), batch_size, options.rounds, options.seconds)
    ratios = {name: Ratio.of([a / b for a, b in zip(speeds[name], speeds["off"], strict=True)]) for name in options.variants}
    return {
        "kind": "constant",
        "name": f"constant batch {batch_size}",
        "batch_size": batch_size,
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ratios": {name: dataclasses.asdict(ratio) for name, ratio in ratios.items()},
        "accept_length": {name: engine.stats.accept_length for name, engine in engines.items()},
        "strategy_steps": {
            name: {arm: s.num_steps for arm, s in engine.stats.by_strategy.items()} for name, engine in engines.items()
        },
    }


# ── the configuration's own phases ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Pair:
    """One rollout phase without and with speculation.

    accept_length: tokens committed per verification; None where nothing was speculated.
    num_different: responses whose tokens differ (in float32 only at near-ties).
    """

    num_tokens: int
    off_seconds: float
    on_seconds: float
    accept_length: float | None
    num_different: int

    @property
    def ratio(self) -> float:
        return self.off_seconds / self.on_seconds


@dataclass(frozen=True)
class Measurement:
    """Pairs of rollout phases. A ratio above 1 says that speculation is faster."""

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
            "kind": "workload",
            "median_ratio": self.median_ratio,
            "ratio_range": [ratios[0], ratios[-1]],
            "ratio_of_sums": sum(p.off_seconds for p in self.pairs) / sum(p.on_seconds for p in self.pairs),
            "accept_length": statistics.mean(lengths) if lengths else None,
            "num_tokens": sum(p.num_tokens for p in self.pairs),
            "num_different": sum(p.num_different for p in self.pairs),
            **self.details,
            "pairs": [{**dataclasses.asdict(pair), "ratio": pair.ratio} for pair in self.pairs],
        }


def launch_workload(config: Config, num_steps: int) -> dict[str, Any]:
    """Measures `num_steps` rollout phases on the configuration's ranks; ends this process with their exit code if they fail."""
    from tlt.distributed.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        inside = with_changes(config, {"run": {"out_dir": Path(folder)}})
        argument = json.dumps({"config": inside.to_json(), "steps": num_steps})
        code = launch(argument, config.run.num_ranks, "tlt.bench.rollout:main", config.run.threads_per_rank)
        if code:
            raise SystemExit(code)
        measured: dict[str, Any] = json.loads((Path(folder) / "bench.json").read_text())
        return measured


def main(argument: str, stop: StopRequest) -> None:
    """Runs on every rank; rank 0 leaves the measurement in run.out_dir/bench.json. argument: what launch_workload packed."""
    given = json.loads(argument)
    config = Config.from_json(given["config"])
    world = join_ranks(config)
    measured = workload(config, world, stop, given["steps"])
    if world.is_leader:
        (config.run.out_dir / "bench.json").write_text(json.dumps(measured.to_json()))
    shutdown(world)


def workload(config: Config, world: World, stop: StopRequest, num_steps: int) -> Measurement:
    """Runs `num_steps` rollout phases of the configuration, each with and without speculation. The policy stays as it is."""
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=600.0)
    plain: Changes = {"rollout": {"speculation": "off"}, "drafter": {"train": False}}
    runs: dict[str, Run] = {}
    for name, changes in (("on", {}), ("off", plain)):
        changed = with_changes(config, {**changes, "run": {"out_dir": config.run.out_dir / name}})
        runs[name] = Run(changed, world, stop, coordinator, prints=False)
    params = runs["on"].params
    pairs, idle, harvested = [], 0.0, 0.0
    for step in range(num_steps):
        problems = problems_of_step(runs["on"].problems, step, config.rollout.problems_per_step, config.run.seed)
        results: dict[str, PhaseResult] = {}
        for name in ("off", "on") if step % 2 == 0 else ("on", "off"):
            started = time.perf_counter()
            num_samples, run = config.rollout.samples_per_problem, runs[name]
            results[name] = run.phase.run(problems, num_samples, params, "rollout", step, run.drafter)
            runs[name].timeline.record(SpanName.STEP, started, time.perf_counter())
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
        "drafter_training_on_critical_path": critical_path_share(spans),
    }
    return Measurement(f"workload of {config.task.name}, {world.world_size} ranks", tuple(pairs), details)


def _generation_seconds(phase: PhaseResult) -> float:
    """Returns the seconds from the first replica's start to the last token of all."""
    return phase.last_token - min(replica.start for replica in phase.replicas)


def _pair(off: Iterable[Rollout], on: Iterable[Rollout], off_seconds: float, on_seconds: float, stats: EngineStats) -> Pair:
    off, on = list(off), list(on)
    different = sum(a.token_ids != b.token_ids for a, b in zip(off, on, strict=True))
    return Pair(sum(len(r.token_ids) for r in on), off_seconds, on_seconds, stats.accept_length, different)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary_line(m: Mapping[str, Any]) -> str:
    """Returns one measurement as one line for the screen."""
    if m["kind"] == "constant":
        words = [f"{name} {ratio_text(r)} times off" for name, r in m["ratios"].items()]
        return f"{m['name']}: off {m['tokens_per_second']['off']:,.0f} tokens/s; " + ", ".join(words)
    low, high = m["ratio_range"]
    return f"{m['name']}: {m['median_ratio']:.2f} times as fast ({low:.2f} to {high:.2f})"


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people. Ratios are geometric means with 95 % confidence intervals unless said otherwise."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for m in report["measurements"]:
        by_kind.setdefault(m["kind"], []).append(m)
    blocks = ["# Rollout benchmark", *provenance(report)]
    blocks.append("Ratios above 1 are faster than off: geometric mean of paired rounds (95 % confidence interval).")
    if constants := by_kind.get("constant"):
        names = list(constants[0]["ratios"])
        rows = [
            [m["batch_size"], f"{m['tokens_per_second']['off']:,.0f}"]
            + [f"{ratio_text(m['ratios'][n])}; accepts {number(m['accept_length'][n])}" for n in names]
            for m in constants
        ]
        blocks += ["## Constant batch", table(["batch", "off, tokens/s", *names], rows)]
    for m in by_kind.get("workload", []):
        low, high = m["ratio_range"]
        details = "; ".join(
            f"{key.replace('_', ' ')} {m[key]:.4f}"
            for key in ("harvested_share", "drafter_training_on_critical_path")
            if m.get(key) is not None
        )
        text = f"Median {m['median_ratio']:.2f} times off (range {low:.2f} – {high:.2f}); {details}."
        blocks += [f"## {m['name']}", text]
    return "\n\n".join(blocks) + "\n"
