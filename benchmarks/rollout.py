"""Measures the long tail: whole rollouts with the lengths of reasoning, with fresh engines and tuners.

    python -m benchmarks.rollout recipes/countdown/quickstart.toml --out RESULT --variants adaptive,4x1x4

    off, adaptive, 4x1x4 │ 4x1x4, adaptive, off │ …

Speculation changes no token, so all variants do the same work (checked). At constant batch sizes:
`benchmarks.constant`. vLLM on the same work: `benchmarks.real_size --workload`.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser, words
from benchmarks.constant import over_off
from benchmarks.longtail import Workload, hash_model, read_workload
from benchmarks.report import header, markdown, ratio_text, table, write_report
from benchmarks.subject import Subject
from benchmarks.turns import in_turns
from tlt.apps.run.start import preflight
from tlt.base.config.load import load_config
from tlt.base.io.files import check_output_file
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request, Rollout
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.tuner import make_tuner
from tlt.training.report.ratio import Ratio


@dataclass(frozen=True)
class Trace:
    """One rollout: its seconds, and by strategy."""

    seconds: float
    accept_length: float | None
    strategy_seconds: Mapping[str, float]


def trace(engine: RolloutBackend, requests: Sequence[Request]) -> tuple[list[Rollout], Trace]:
    """Generates responses to all requests; returns them in the order of (problem, sample), and what the
    rollout took."""
    engine.stats = EngineStats()
    start = time.perf_counter()
    rollouts = sorted(engine.generate(requests), key=lambda r: (r.problem_id, r.sample_index))
    seconds = time.perf_counter() - start
    by_seconds = {name: s.seconds for name, s in engine.stats.by_strategy.items()}
    return rollouts, Trace(seconds, engine.stats.accept_length, by_seconds)


def side_by_side(
    make_engine: Mapping[str, Callable[[], RolloutBackend]],
    requests: Sequence[Request],
    num_rounds: int,
    on_trace: Callable[[str, Trace], None] = lambda name, trace: None,
) -> tuple[dict[str, list[Trace]], int]:
    """Runs the same rollout with every variant `num_rounds` times, each in a fresh engine, in turns.

    Returns the traces by variant, and how many responses differed from those of the first rollout (in float32
    a near-tie may).
    """
    texts: list[list[tuple[int, ...]]] = []

    def run(name: str) -> Trace:
        rollouts, measured = trace(make_engine[name](), requests)
        on_trace(name, measured)
        texts.append([rollout.token_ids for rollout in rollouts])
        return measured

    traces = in_turns({name: partial(run, name) for name in make_engine}, num_rounds)
    return traces, sum(a != b for other in texts for a, b in zip(other, texts[0], strict=True))


def longtail(
    subject: Subject, workload: Workload, variants: Sequence[str], num_rounds: int
) -> dict[str, Any]:
    """Measures whole rollouts of every variant, with tuners that know nothing."""
    max_batch = subject.config.rollout.max_batch_size
    traces, num_different = side_by_side(
        {name: partial(subject.engine, name, max_batch) for name in ("off", *variants)},
        workload.requests,
        num_rounds,
        lambda name, t: print(
            f"longtail, {name}: {workload.num_tokens / t.seconds:,.0f} tokens/s", flush=True
        ),
    )
    seconds = {name: [t.seconds for t in ts] for name, ts in traces.items()}
    size = f"{len(workload.requests)} requests, {workload.num_tokens:,} tokens"
    return {
        "kind": "longtail",
        "name": f"longtail, {size}, {workload.shape}",
        "max_batch_size": max_batch,
        "num_tokens": workload.num_tokens,
        "tokens_per_second": {
            name: workload.num_tokens / statistics.median(took) for name, took in seconds.items()
        },
        "seconds": seconds,
        "ratios": {
            name: dataclasses.asdict(Ratio.between(seconds["off"], seconds[name])) for name in variants
        },
        "accept_length": {name: ts[-1].accept_length for name, ts in traces.items()},
        "strategy_seconds": {name: dict(ts[-1].strategy_seconds) for name, ts in traces.items()},
        "num_different": num_different,
    }


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    (m,) = report["measurements"]
    ratios = {"off": "1", **{name: ratio_text(ratio) for name, ratio in m["ratios"].items()}}
    rows = [[name, f"{speed:,.0f}", ratios[name]] for name, speed in m["tokens_per_second"].items()]
    said = (
        f"At most {m['max_batch_size']} at a time; {m['num_different']} responses differed. Ratios above 1 "
        "are faster than off:"
        " geometric mean of paired rounds (95 % confidence interval)."
    )
    blocks = [f"## {m['name']}", said, table(["variant", "tokens/s", "over off"], rows)]
    return markdown("Rollout benchmark", report, *blocks)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("rollout", __doc__)
    parser.add_argument("config", type=Path, help="a run's configuration; --section.key VALUE overrides it")
    parser.add_argument(
        "--variants", type=words, default=("adaptive",), help="besides off: adaptive, 4x1x4, …"
    )
    parser.add_argument("--rounds", type=int, default=8, help="rollouts of every variant")
    parser.add_argument(
        "--workload", type=Path, help="file of the long tail; default: longtail.json beside CONFIG"
    )
    options, overrides = parser.parse_known_args(arguments)
    config = load_config(options.config, overrides)
    check_output_file(options.out.with_name(options.out.name + ".json"), "--out")
    for variant in options.variants:
        make_tuner(parse_speculation(variant), drafter_kinds(config.drafter.path is not None))
    preflight(config)
    workload = read_workload(
        options.workload or options.config.with_name("longtail.json"), hash_model(config.model.path)
    )
    subject = Subject(config)
    measurements = [longtail(subject, workload, options.variants, max(options.rounds, 1))]
    print(over_off(measurements[0]), flush=True)
    report = {**header(config, command_of(parser, arguments)), "measurements": measurements}
    write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("rollout", main))
