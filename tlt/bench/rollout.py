"""`tlt bench rollout`: how fast is the rollout, with which strategy, and how close to the best it could be?

    constant   engines kept at one batch size, off against the variants, in turns          (measure.py)
    longtail   whole rollouts with the lengths of reasoning, fresh tuners, and the peers   (longtail.py, peers.py)
    arms       every strategy's cost and acceptance, for the ceiling and for replays       (arms.py, replay.py)
    workload   the configuration's own rollout phases on all ranks, idle time and drafter training included

Speculation changes no token, so all of these do the same work (checked).
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.arms import ArmCosts, record_arms
from benchmarks.longtail import Workload, hash_model, read_workload
from benchmarks.peers import PeerResult, run_transformers, run_vllm
from benchmarks.plots import plot_longtail, plot_regret
from benchmarks.replay import RecordedCosts, Replay, replay
from tlt.bench.measure import Ratio, Trace, constant_batch, side_by_side
from tlt.bench.report import Changes, header, number, provenance, ratio_text, table, with_changes, write_report
from tlt.bench.subject import BestArms, Subject
from tlt.config.schema import Config
from tlt.distributed.work_queue import connect_coordinator
from tlt.distributed.world import World, init_process_group_from_env, shutdown
from tlt.engine.stats import EngineStats
from tlt.report.timeline import critical_path_share, read_spans
from tlt.train.phase import PhaseResult
from tlt.train.run import Run, device_name, problems_of_step
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import BegMab, default_arms, default_groups
from tlt.types import Rollout, SpanName, Strategy, StrategyTuner

if TYPE_CHECKING:
    from tlt.distributed.launch import StopRequest


@dataclass(frozen=True)
class Options:
    """What to measure and how much of it.

    parts: some of constant, longtail, arms, workload.  variants: besides off: adaptive, beg-mab, fixed strategies.
    rounds: per constant batch size and of the longtail workload.  seconds: of one stretch at a constant batch.
    arm_rounds: turns of every arm (fewer at large batches).  steps: rollout phases of the workload.
    recorded: an earlier report whose arms serve as the best in hindsight.  workload: the longtail file.
    peers: some of transformers, vllm, vllm-eager, vllm-ngram.
    """

    parts: tuple[str, ...]
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    seconds: float
    arm_rounds: int
    temperatures: tuple[float, ...]
    steps: int
    workload: Path
    peers: tuple[str, ...]
    vllm: Path | None
    recorded: Path | None
    out: Path


# ── constant batches ─────────────────────────────────────────────────────────────────────────────────────────────────


def constant(subject: Subject, options: Options, batch_size: int) -> dict[str, Any]:
    """Every variant's tokens per second over off's at this batch size."""
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


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def arms(subject: Subject, options: Options, batch_size: int, temperature: float, ranking: str = "coupled") -> ArmCosts:
    """All default arms at one batch size, in turns."""
    engine = subject.engine("adaptive", batch_size, ranking=ranking)
    rounds = max(round(options.arm_rounds / batch_size**0.6), min(options.arm_rounds, 6))
    num = max(batch_size // 2, 8)
    return record_arms(
        engine,
        lambda i: subject.requests(i, num, temperature),
        default_arms(subject.kinds),
        batch_size,
        temperature,
        rounds,
    )


def arms_report(costs: ArmCosts, ranking: str) -> dict[str, Any]:
    off = costs.speed(Strategy.OFF)
    table = {
        str(arm): {"speed_over_off": costs.speed(arm) / off, "accept_length": costs.accept_length(arm)}
        for arm in sorted(costs.steps, key=costs.speed, reverse=True)
    }
    name = f"arms at batch {costs.batch_size}, temperature {costs.temperature:g}, ranking {ranking}"
    return {"kind": "arms", "name": name, "off_tokens_per_second": off, "arms": table, "ranking": ranking, **costs.to_json()}


def regrets(recorded: Sequence[ArmCosts], lengths: Sequence[int], max_batch: int, out: Path) -> dict[str, Any]:
    """Both tuners against the same recorded costs, ten rollouts of each; the plot goes to `out`."""
    costs = RecordedCosts(recorded)
    makers: dict[str, Callable[[int], StrategyTuner]] = {
        "cost model": lambda seed: CostModel(costs.arms),
        "BEG-MAB": lambda seed: BegMab(default_groups(costs.arms), rng=random.Random(seed)),
    }
    replays: dict[str, list[Replay]] = {
        name: [replay(make(seed), costs, lengths, max_batch, seed) for seed in range(10)] for name, make in makers.items()
    }
    plot_regret(replays, out)
    return {
        "kind": "replay",
        "name": "tuners on recorded costs, first rollout",
        "share_of_best": {n: statistics.mean(r.share_of_best() for r in rs) for n, rs in replays.items()},
        "share_of_best_second_half": {n: statistics.mean(r.share_of_best(0.5) for r in rs) for n, rs in replays.items()},
        "regret_seconds": {n: statistics.mean(r.regrets[-1] for r in rs) for n, rs in replays.items()},
        "seconds": {n: statistics.mean(r.times[-1] for r in rs) for n, rs in replays.items()},
    }


# ── longtail ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def longtail(
    subject: Subject, options: Options, workload: Workload, recorded: Sequence[ArmCosts], say: Callable[[str], None]
) -> dict[str, Any]:
    """Whole rollouts of every variant, with tuners that know nothing; `best arms` knows the recorded costs beforehand."""
    max_batch = subject.config.rollout.max_batch_size
    makers: dict[str, Callable[[], Any]] = {
        name: partial(subject.engine, name, max_batch) for name in ("off", *options.variants)
    }
    if recorded:
        makers["best arms"] = lambda: subject.engine(BestArms(list(recorded)), max_batch)
    traces, num_different = side_by_side(
        makers,
        workload.requests,
        options.rounds,
        lambda name, t: say(f"longtail, {name}: {workload.num_tokens / t.seconds:,.0f} tokens/s"),
    )
    off = traces["off"]
    ratios = {name: Ratio.of([a.seconds / b.seconds for a, b in zip(off, ts, strict=True)]) for name, ts in traces.items()}
    report: dict[str, Any] = {
        "kind": "longtail",
        "name": f"longtail, {len(workload.requests)} requests, {workload.num_tokens:,} tokens, {workload.shape}",
        "max_batch_size": max_batch,
        "num_tokens": workload.num_tokens,
        "tokens_per_second": {n: workload.num_tokens / statistics.median(t.seconds for t in ts) for n, ts in traces.items()},
        "seconds": {name: [t.seconds for t in ts] for name, ts in traces.items()},
        "ratios": {name: dataclasses.asdict(ratio) for name, ratio in ratios.items() if name != "off"},
        "accept_length": {name: ts[-1].accept_length for name, ts in traces.items()},
        "strategy_seconds": {name: dict(ts[-1].strategy_seconds) for name, ts in traces.items()},
        "prediction_error": {name: ts[-1].prediction_error for name, ts in traces.items()},
        "num_different": num_different,
    }
    if recorded:
        best = traces["best arms"]
        for name in options.variants:
            report.setdefault("share_of_best", {})[name] = _share(best, traces[name], 0.0)
            report.setdefault("share_of_best_second_half", {})[name] = _share(best, traces[name], 0.5)
    medians = {name: sorted(ts, key=lambda t: t.seconds)[len(ts) // 2] for name, ts in traces.items()}
    plot_longtail(medians, options.out.with_name(options.out.name + "-longtail.svg"))
    return report


def _share(best: Sequence[Trace], traces: Sequence[Trace], since: float) -> dict[str, Any]:
    """How fast beside the best arms in hindsight, from when `since` of the tokens were done."""
    pairs = zip(best, traces, strict=True)
    return dataclasses.asdict(Ratio.of([a.seconds_since(since) / b.seconds_since(since) for a, b in pairs]))


def peers(subject: Subject, options: Options, workload: Workload) -> Iterator[PeerResult]:
    """One after the other, each as soon as it is done: transformers takes long."""
    model, max_batch = subject.config.model.path, subject.config.rollout.max_batch_size
    threads = subject.config.run.threads_per_rank
    for name in options.peers:
        if name == "transformers":
            yield from run_transformers(model, [workload], batch_size=max_batch, threads=threads)
            continue
        assert options.vllm is not None, "commands.py asks for --vllm"
        ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 10, "prompt_lookup_min": 4}
        yield from run_vllm(
            options.vllm,
            model,
            [workload],
            max_num_seqs=max_batch,
            rounds=3,
            threads=threads,
            enforce_eager=name == "vllm-eager",
            speculative=ngram if name == "vllm-ngram" else None,
        )


# ── the configuration's own phases ───────────────────────────────────────────────────────────────────────────────────


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
    """Pairs of rollout phases; a ratio above 1 says that speculation is faster."""

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


def main(config_json: str, stop: StopRequest) -> None:
    """What every rank runs; rank 0 leaves the measurement in run.out_dir/bench.json. Options travel in the environment,
    since `launch` carries the configuration alone."""
    config = Config.from_json(config_json)
    options = json.loads(os.environ["TLT_BENCH_ROLLOUT"])
    torch.set_num_threads(config.run.threads_per_rank)
    world = init_process_group_from_env(device_name(config))
    measured = workload(config, world, stop, options["steps"])
    if world.is_leader:
        (config.run.out_dir / "bench.json").write_text(json.dumps(measured.to_json()))
    shutdown(world)


def workload(config: Config, world: World, stop: StopRequest, num_steps: int) -> Measurement:
    """Rollout phases of the configuration, `num_steps` of them, in both ways; the policy stays as it is."""
    coordinator = connect_coordinator(world.store, world.rank, world.world_size, timeout=600.0)
    plain: Changes = {"rollout": {"speculation": "off"}, "drafter": {"train": False}}
    runs: dict[str, Run] = {}
    for name, changes in (("on", {}), ("off", plain)):
        changed = with_changes(config, {**changes, "run": {"out_dir": config.run.out_dir / name}})
        runs[name] = Run(changed, world, stop, coordinator)
    params = runs["on"].sampling_params()
    pairs, idle, harvested = [], 0.0, 0.0
    for step in range(num_steps):
        problems = problems_of_step(runs["on"].problems, step, config.rollout.problems_per_step, config.run.seed)
        results: dict[str, PhaseResult] = {}
        for name in ("off", "on") if step % 2 == 0 else ("on", "off"):
            started = time.perf_counter()
            results[name] = runs[name].phase.run(problems, config.rollout.samples_per_problem, params, "rollout", step)
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
    """From the first replica's start to the last token of all."""
    return phase.last_token - min(replica.start for replica in phase.replicas)


def _pair(off: Iterable[Rollout], on: Iterable[Rollout], off_seconds: float, on_seconds: float, stats: EngineStats) -> Pair:
    off, on = list(off), list(on)
    different = sum(a.token_ids != b.token_ids for a, b in zip(off, on, strict=True))
    return Pair(sum(len(r.token_ids) for r in on), off_seconds, on_seconds, stats.accept_length, different)


# ── all of it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_benchmark(config: Config, options: Options, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, written to `out`.json and `out`.md with the plots beside them; returns the report."""
    measurements: list[dict[str, Any]] = []
    recorded: list[ArmCosts] = []
    subject = Subject(config)
    if options.recorded is not None:
        earlier = json.loads(options.recorded.read_text())["measurements"]
        same = [m for m in earlier if m["kind"] == "arms" and m["ranking"] == "coupled"]
        recorded = [ArmCosts.from_json(m) for m in same if m["temperature"] == subject.params.temperature]

    def done(measured: dict[str, Any]) -> None:
        measurements.append(measured)
        say(summary_line(measured))
        _write(config, options, command, measurements)  # a run that is cut off keeps what it has

    if "arms" in options.parts:
        for temperature in options.temperatures:
            for batch_size in options.batches:
                costs = arms(subject, options, batch_size, temperature)
                if temperature == subject.params.temperature:
                    recorded.append(costs)
                done(arms_report(costs, "coupled"))
            done(arms_report(arms(subject, options, options.batches[0], temperature, "top-k"), "top-k"))
    if "constant" in options.parts:
        for batch_size in options.batches:
            done(constant(subject, options, batch_size))
    if "longtail" in options.parts:
        workload = read_workload(options.workload, hash_model(config.model.path))
        if recorded:
            plot = options.out.with_name(options.out.name + "-regret.svg")
            done(regrets(recorded, workload.lengths, config.rollout.max_batch_size, plot))
        done(longtail(subject, options, workload, recorded, say))
        ours = measurements[-1]["tokens_per_second"]
        for result in peers(subject, options, workload):
            faster = {name: speed / result.tokens_per_second for name, speed in ours.items()}
            done({"kind": "peer", **result.to_json(), "our_speed_over_it": faster})
    if "workload" in options.parts:
        done(_launch_workload(config, options.steps))
    return _write(config, options, command, measurements)


def _launch_workload(config: Config, num_steps: int) -> dict[str, Any]:
    from tlt.distributed.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        inside = with_changes(config, {"run": {"out_dir": Path(folder)}})
        os.environ["TLT_BENCH_ROLLOUT"] = json.dumps({"steps": num_steps})
        code = launch(inside.to_json(), config.run.num_ranks, "tlt.bench.rollout:main", config.run.threads_per_rank)
        if code:
            raise SystemExit(code)
        measured: dict[str, Any] = json.loads((Path(folder) / "bench.json").read_text())
        return measured


def _write(config: Config, options: Options, command: str, measurements: list[dict[str, Any]]) -> dict[str, Any]:
    report = {**header(config, command), "measurements": measurements}
    write_report(options.out, report, to_markdown(report))
    return report


def summary_line(m: Mapping[str, Any]) -> str:
    match m["kind"]:
        case "constant" | "longtail":
            words = [f"{name} {ratio_text(r)} times off" for name, r in m["ratios"].items()]
            return f"{m['name']}: off {m['tokens_per_second']['off']:,.0f} tokens/s; " + ", ".join(words)
        case "arms":
            best, values = next(iter(m["arms"].items()))
            return f"{m['name']}: best {best}, {values['speed_over_off']:.2f} times off"
        case "replay":
            return f"{m['name']}: " + ", ".join(f"{n} {v:.1%} of the best" for n, v in m["share_of_best"].items())
        case "peer":
            return f"{m['name']}: {m['tokens_per_second']:,.0f} tokens/s"
        case _:
            low, high = m["ratio_range"]
            return f"{m['name']}: {m['median_ratio']:.2f} times as fast ({low:.2f} to {high:.2f})"


def to_markdown(report: Mapping[str, Any]) -> str:
    """The same for people. Ratios are geometric means with 95 % confidence intervals unless said otherwise."""
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
    for m in by_kind.get("longtail", []):
        rows = []
        for name, speed in m["tokens_per_second"].items():
            ratio = ratio_text(m["ratios"][name]) if name in m["ratios"] else "1"
            shares = [m.get(key, {}).get(name) for key in ("share_of_best", "share_of_best_second_half")]
            rows.append([name, f"{speed:,.0f}", ratio, *("–" if s is None else ratio_text(s) for s in shares)])
        columns = ["variant", "tokens/s", "over off", "over the best arms in hindsight", "the same, second half of the tokens"]
        blocks += [f"## {m['name']}", f"At most {m['max_batch_size']} at a time; {m['num_different']} responses differed."]
        blocks.append(table(columns, rows))
    if results := by_kind.get("peer"):
        rows = []
        for m in results:
            rows.append([m["name"], f"{m['tokens_per_second']:,.0f}", *(f"{v:.2f}" for v in m["our_speed_over_it"].values())])
        names = [f"our {name} over it" for name in results[0]["our_speed_over_it"]]
        blocks += ["## Peers on the same prompts and lengths", table(["peer", "tokens/s", *names], rows)]
    for m in by_kind.get("replay", []):
        rows = [
            [n, f"{m['share_of_best'][n]:.1%}", f"{m['share_of_best_second_half'][n]:.1%}", f"{m['regret_seconds'][n]:.2f}"]
            for n in m["share_of_best"]
        ]
        columns = ["tuner", "of the best arms' speed", "second half of the tokens", "regret, s"]
        blocks += [f"## {m['name']}", table(columns, rows)]
    for m in by_kind.get("workload", []):
        low, high = m["ratio_range"]
        details = "; ".join(
            f"{key.replace('_', ' ')} {m[key]:.4f}"
            for key in ("harvested_share", "drafter_training_on_critical_path")
            if m.get(key) is not None
        )
        text = f"Median {m['median_ratio']:.2f} times off (range {low:.2f} – {high:.2f}); {details}."
        blocks += [f"## {m['name']}", text]
    for m in by_kind.get("arms", []):
        rows = [[n, f"{v['speed_over_off']:.2f}", f"{v['accept_length']:.2f}"] for n, v in m["arms"].items()]
        blocks += [f"## {m['name'][0].upper()}{m['name'][1:]}", table(["arm", "speed over off", "accept length"], rows)]
    return "\n\n".join(blocks) + "\n"
