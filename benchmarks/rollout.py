"""Measures this project's rollout: every strategy's cost, the long tail beside the best in hindsight, and the peers.

    python -m benchmarks.rollout recipes/countdown/quickstart.toml --parts longtail,arms --out RESULT

    longtail   whole rollouts with the lengths of reasoning, fresh tuners, and the peers   (longtail.py, peers.py)
    arms       every strategy's cost and acceptance, for the ceiling and for replays       (arms.py, replay.py)

Writes RESULT.json and RESULT.md with the plots beside them. Speculation changes no token, so all variants do the same work
(checked). What a user measures of a configuration of their own is `tlt bench rollout`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import ArmCosts, BestArms, record_arms
from benchmarks.longtail import Workload, hash_model, read_workload
from benchmarks.peers import PeerResult, run_transformers, run_vllm, setup_vllm
from benchmarks.plots import check_plots, plot_longtail, plot_regret
from benchmarks.replay import RecordedCosts, replay
from benchmarks.traces import Trace, side_by_side
from tlt.bench.measure import Ratio
from tlt.bench.report import header, open_report, over_off, ratio_text, table, write_report
from tlt.bench.subject import Subject
from tlt.build.engine import build_engine
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.files import check_output_file
from tlt.training.start import preflight
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import default_arms, make_tuner
from tlt.types import Strategy, UserError

PARTS = ("longtail", "arms")
PEERS = ("transformers", "vllm", "vllm-eager", "vllm-ngram")


@dataclass(frozen=True)
class Options:
    """How much to measure of each part.

    variants: besides off: adaptive, fixed strategies.  batches, temperatures: of arms.  rounds: of the long tail.
    arm_rounds: turns of every arm at batch 1 (fewer at larger batches, where a step says more).
    recorded: an earlier report whose arms serve as the best in hindsight.  workload: the long-tail file.
    """

    parts: tuple[str, ...]
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    arm_rounds: int
    temperatures: tuple[float, ...]
    workload: Path
    peers: tuple[str, ...]
    vllm: Path | None
    recorded: Path | None
    out: Path


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def arms(subject: Subject, options: Options, batch_size: int, temperature: float, ranking: str = "coupled") -> ArmCosts:
    """All default arms at one batch size, in turns."""
    drafting = subject.settings.drafting.model_copy(update={"ranking": ranking})
    settings = dataclasses.replace(subject.settings, speculation="adaptive", max_batch_size=batch_size, drafting=drafting)
    engine = build_engine(subject.model.config, subject.model.tensors, settings, subject.drafter)
    params = dataclasses.replace(subject.params, temperature=temperature)
    rounds = max(round(options.arm_rounds / batch_size**0.6), min(options.arm_rounds, 6))
    num = max(batch_size // 2, 8)
    return record_arms(
        engine,
        lambda i: [dataclasses.replace(request, params=params) for request in subject.requests(i, num)],
        default_arms(drafter_kinds(subject.drafter is not None)),
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
    """Returns how the cost model fares with the recorded costs, in ten rollouts; the plot goes to `out`."""
    costs = RecordedCosts(recorded)
    replays = {"cost model": [replay(CostModel(costs.arms), costs, lengths, max_batch, seed) for seed in range(10)]}
    plot_regret(replays, out)
    return {
        "kind": "replay",
        "name": "tuners on recorded costs, first rollout",
        "share_of_best": {n: statistics.mean(r.share_of_best() for r in rs) for n, rs in replays.items()},
        "share_of_best_second_half": {n: statistics.mean(r.share_of_best(0.5) for r in rs) for n, rs in replays.items()},
        "regret_seconds": {n: statistics.mean(r.regrets[-1] for r in rs) for n, rs in replays.items()},
        "seconds": {n: statistics.mean(r.times[-1] for r in rs) for n, rs in replays.items()},
    }


# ── the long tail ────────────────────────────────────────────────────────────────────────────────────────────────────


def longtail(
    subject: Subject, options: Options, workload: Workload, recorded: Sequence[ArmCosts], say: Callable[[str], None]
) -> dict[str, Any]:
    """Whole rollouts of every variant, with tuners that know nothing; `best arms` knows the recorded costs beforehand."""
    max_batch = subject.config.rollout.max_batch_size
    makers: dict[str, Callable[[], Any]] = {
        name: partial(subject.engine, name, max_batch) for name in ("off", *options.variants)
    }
    if recorded:
        model, settings = subject.model, dataclasses.replace(subject.settings, max_batch_size=max_batch)
        makers["best arms"] = lambda: build_engine(
            model.config, model.tensors, settings, subject.drafter, tuner=BestArms(list(recorded))
        )
    traces, num_different = side_by_side(
        makers,
        workload.requests,
        options.rounds,
        lambda name, t: say(f"longtail, {name}: {workload.num_tokens / t.seconds:,.0f} tokens/s"),
    )
    off = traces["off"]
    ratios = {name: Ratio.between([t.seconds for t in off], [t.seconds for t in ts]) for name, ts in traces.items()}
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
    return dataclasses.asdict(Ratio.between([t.seconds_since(since) for t in best], [t.seconds_since(since) for t in traces]))


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


# ── all of it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_benchmark(config: Config, options: Options, command: str, say: Callable[[str], None]) -> None:
    """Measures the parts asked for. OUT.json and OUT.md are written after each: a run that is cut off keeps what it has."""
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
        report = {**header(config, command), "measurements": measurements}
        write_report(options.out, report, to_markdown(report))

    if "arms" in options.parts:
        for temperature in options.temperatures:
            for batch_size in options.batches:
                costs = arms(subject, options, batch_size, temperature)
                if temperature == subject.params.temperature:
                    recorded.append(costs)
                done(arms_report(costs, "coupled"))
            done(arms_report(arms(subject, options, options.batches[0], temperature, "top-k"), "top-k"))
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


def summary_line(m: Mapping[str, Any]) -> str:
    match m["kind"]:
        case "longtail":
            return over_off(m)
        case "arms":
            best, values = next(iter(m["arms"].items()))
            return f"{m['name']}: best {best}, {values['speed_over_off']:.2f} times off"
        case "replay":
            return f"{m['name']}: " + ", ".join(f"{n} {v:.1%} of the best" for n, v in m["share_of_best"].items())
        case _:
            return f"{m['name']}: {m['tokens_per_second']:,.0f} tokens/s"


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report for people. Ratios are geometric means with 95 % confidence intervals unless said otherwise."""
    blocks, by_kind = open_report(report)
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
    for m in by_kind.get("arms", []):
        rows = [[n, f"{v['speed_over_off']:.2f}", f"{v['accept_length']:.2f}"] for n, v in m["arms"].items()]
        blocks += [f"## {m['name'][0].upper()}{m['name'][1:]}", table(["arm", "speed over off", "accept length"], rows)]
    return "\n\n".join(blocks) + "\n"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(arguments: Sequence[str]) -> tuple[Config, Options]:
    """The configuration, its overrides (--section.key VALUE) applied, and the options. Checks files before work begins."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, help="TOML configuration, as for tlt train; --section.key VALUE overrides it")
    parser.add_argument("--out", type=Path, required=True, help="results go to OUT.json and OUT.md, plots beside them")
    parser.add_argument("--parts", type=_words, default=("longtail",), help="some of longtail,arms")
    parser.add_argument(
        "--variants",
        type=_words,
        default=("adaptive",),
        help="of the long tail, besides off: adaptive, fixed strategies such as 4x1x4",
    )
    parser.add_argument("--batches", type=_numbers(int), default=(1, 2, 4, 8, 16, 32), help="batch sizes of arms")
    parser.add_argument("--rounds", type=_positive, default=8, help="rollouts of every variant on the long tail")
    parser.add_argument(
        "--arm-rounds", type=_positive, default=60, help="turns of every strategy at batch 1, fewer at larger batches"
    )
    parser.add_argument("--temperatures", type=_numbers(float), default=(1.0,), help="sampling temperatures of arms")
    parser.add_argument("--workload", type=Path, help="file of the long tail; default: longtail.json beside CONFIG")
    parser.add_argument(
        "--recorded",
        type=Path,
        help="OUT.json of an earlier run with arms at the configured temperature: compare with the best of them",
    )
    parser.add_argument("--peers", type=_words, default=(), help=f"some of {','.join(PEERS)}, on the long tail")
    parser.add_argument("--vllm", type=Path, help="the interpreter of an environment with vLLM")
    parser.add_argument("--setup-vllm", type=Path, help="make such an environment in this folder first (2 GB, several minutes)")
    given, overrides = parser.parse_known_args(arguments)
    setup = given.__dict__.pop("setup_vllm")
    config_path = given.__dict__.pop("config")
    given.workload = given.workload or config_path.with_name("longtail.json")
    given.vllm = setup_vllm(setup) if setup is not None else given.vllm
    options = Options(**vars(given))
    config = load_config(config_path, overrides)
    check(config, options)
    return config, options


def check(config: Config, options: Options) -> None:
    """Raises UserError now rather than after an hour of measuring."""
    for name, given, known in (("parts", options.parts, PARTS), ("peers", options.peers, PEERS)):
        if unknown := [word for word in given if word not in known]:
            raise UserError(f"--{name}: {unknown[0]!r} is unknown; give some of {', '.join(known)}")
    if any(peer.startswith("vllm") for peer in options.peers) and options.vllm is None:
        raise UserError("--peers: vllm needs the interpreter of an environment that has it; give --vllm, or --setup-vllm DIR")
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    if options.recorded is not None and not options.recorded.is_file():
        raise UserError(f"--recorded: {options.recorded} does not exist; give the OUT.json of a run with --parts arms")
    for variant in options.variants:
        make_tuner(variant, drafter_kinds(config.drafter.path is not None))
    preflight(config)
    if "longtail" in options.parts:
        check_plots()
        read_workload(options.workload, hash_model(config.model.path))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _positive(text: str, kind: type = int) -> Any:
    value = kind(text)
    if value < 1 and kind is int:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return value


def _numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(_positive(word, kind) for word in _words(text))


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        config, options = parse(words)
        command = " ".join(["python -m benchmarks.rollout", *words])
        run_benchmark(config, options, command, lambda line: print(line, flush=True))
    except UserError as error:
        print(f"benchmarks.rollout: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
