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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.bench.measure import Ratio, constant_batch
from tlt.bench.report import Changes, number, open_report, over_off, ratio_text, side_by_side, speed, table, with_changes
from tlt.bench.subject import Subject
from tlt.config.schema import Config
from tlt.distributed.work_queue import connect_coordinator
from tlt.distributed.world import World, shutdown
from tlt.report.timeline import critical_path_share, read_spans
from tlt.spans import SpanName
from tlt.training.problems import problems_of_step
from tlt.training.rollout.result import PhaseResult
from tlt.training.run import Run, join_ranks

if TYPE_CHECKING:
    from tlt.distributed.signals import StopRequest


# ── constant batches ─────────────────────────────────────────────────────────────────────────────────────────────────


def constant(subject: Subject, variants: Sequence[str], batch_size: int, num_rounds: int, seconds: float) -> dict[str, Any]:
    """Measures every variant's tokens per second over off's at this batch size, in rounds of so many seconds each."""
    engines = {name: subject.engine(name, batch_size) for name in ("off", *variants)}
    num = max(batch_size, 8)
    speeds = constant_batch(engines, lambda i: subject.requests(i, num), batch_size, num_rounds, seconds)
    ratios = {name: Ratio.between(speeds[name], speeds["off"]) for name in variants}
    for engine in engines.values():
        engine.close()
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

    ratio: of their seconds; above 1, speculation is faster.
    accept_length: tokens committed per verification; None where nothing was speculated.
    num_different: responses whose tokens differ (in float32 only at near-ties).
    """

    num_tokens: int
    off_seconds: float
    on_seconds: float
    accept_length: float | None
    num_different: int
    ratio: float

    @staticmethod
    def of(off: PhaseResult, on: PhaseResult) -> Pair:
        off_seconds, on_seconds = _generation_seconds(off), _generation_seconds(on)
        num_different = sum(a.token_ids != b.token_ids for a, b in zip(off.rollouts, on.rollouts, strict=True))
        num_tokens = sum(len(rollout.token_ids) for rollout in on.rollouts)
        return Pair(num_tokens, off_seconds, on_seconds, on.stats.accept_length, num_different, off_seconds / on_seconds)


def summarize(name: str, pairs: Sequence[Pair], details: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the measurement that the pairs amount to."""
    ratios = sorted(pair.ratio for pair in pairs)
    lengths = [pair.accept_length for pair in pairs if pair.accept_length is not None]
    return {
        "name": name,
        "kind": "workload",
        "median_ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "ratio_of_sums": sum(pair.off_seconds for pair in pairs) / sum(pair.on_seconds for pair in pairs),
        "accept_length": statistics.mean(lengths) if lengths else None,
        "num_tokens": sum(pair.num_tokens for pair in pairs),
        "num_different": sum(pair.num_different for pair in pairs),
        **details,
        "pairs": [dataclasses.asdict(pair) for pair in pairs],
    }


def launch_workload(config: Config, num_steps: int) -> dict[str, Any]:
    """Measures `num_steps` rollout phases on the configuration's ranks; ends this process with their exit code if they fail."""
    from tlt.build.model import all_ranks
    from tlt.distributed.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        inside = with_changes(config, {"run": {"out_dir": Path(folder)}})
        argument = json.dumps({"config": inside.to_json(), "steps": num_steps})
        code = launch(argument, all_ranks(config), "tlt.bench.rollout:main", config.run.threads_per_rank)
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
        (config.run.out_dir / "bench.json").write_text(json.dumps(measured))
    shutdown(world)


def workload(config: Config, world: World, stop: StopRequest, num_steps: int) -> dict[str, Any]:
    """Runs `num_steps` rollout phases of the configuration, each with and without speculation. The policy stays as it is."""
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=world.timeout_seconds)
    plain: Changes = {"rollout": {"speculation": "off"}, "drafter": {"train": False}}
    config = with_changes(config, side_by_side(config))
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
        pairs.append(Pair.of(off, on))
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
    return summarize(f"workload of {config.task.name}, {world.world_size} ranks", pairs, details)


def _generation_seconds(phase: PhaseResult) -> float:
    """Returns the seconds from the first replica's start to the last token of all."""
    return phase.last_token - min(replica.start for replica in phase.replicas)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary_line(m: Mapping[str, Any]) -> str:
    """Returns one measurement as one line for the screen."""
    if m["kind"] == "constant":
        return over_off(m)
    low, high = m["ratio_range"]
    return f"{m['name']}: {m['median_ratio']:.2f} times as fast ({low:.2f} to {high:.2f})"


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people. Ratios are geometric means with 95 % confidence intervals unless said otherwise."""
    blocks, by_kind = open_report(report)
    if constants := by_kind.get("constant"):
        names = list(constants[0]["ratios"])
        rows = [
            [m["batch_size"], speed(m["tokens_per_second"]["off"])]
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
