"""Tokens per second at constant batch sizes, of off and of the variants, in turns.

python -m benchmarks.constant countdown --out RESULT --variants adaptive,4x1x4 --batches 1,4,16
python -m benchmarks.constant countdown --out RESULT --geometry qwen2.5-0.5b     # grown.py
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
from benchmarks.grown import grown_config, plan_growth
from benchmarks.report import header, markdown, number, ratio_text, speed_text, table, write_report
from benchmarks.subject import Subject
from benchmarks.turns import in_turns
from tlt.apps.run.start import pin, preflight
from tlt.base.config.load import load_config
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner.tuner import make_tuner
from tlt.training.report.ratio import Ratio


@dataclass
class _Stretch:
    """Runs an engine at one batch size, from an endless supply of requests."""

    engine: RolloutBackend
    supply: Callable[[int], Sequence[Request]]
    batch_size: int
    num_taken: int = 0

    def run(self, seconds: float) -> float:
        """Generates for about `seconds`; returns the tokens per second."""
        tokens, start = self.engine.stats.num_tokens, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            while self.engine.num_waiting < self.batch_size:
                self.engine.add(self.supply(self.num_taken))
                self.num_taken += 1
            self.engine.step()
        return (self.engine.stats.num_tokens - tokens) / elapsed


def constant_batch(
    engines: Mapping[str, RolloutBackend],
    supply: Callable[[int], Sequence[Request]],
    batch_size: int,
    num_rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Returns every engine's tokens per second, one value for each round.

    engines: decode `batch_size` sequences at a time.
    supply: returns the i-th share of requests.
    seconds: of one engine in one round. Before the first round each warms up for three times as long.
    """
    stretches = {name: _Stretch(engine, supply, batch_size) for name, engine in engines.items()}
    for stretch in stretches.values():
        stretch.run(3 * seconds)
        stretch.engine.stats = EngineStats()
    return in_turns({name: partial(stretch.run, seconds) for name, stretch in stretches.items()}, num_rounds)


def constant(
    subject: Subject, variants: Sequence[str], batch_size: int, num_rounds: int, seconds: float
) -> dict[str, Any]:
    """Measures every variant's tokens per second over off's at this batch size. seconds: of each turn."""
    engines = {name: subject.engine(name, batch_size) for name in ("off", *variants)}
    num = max(batch_size, 8)
    speeds = constant_batch(engines, lambda i: subject.requests(i, num), batch_size, num_rounds, seconds)
    for engine in engines.values():
        engine.close()
    return {
        "kind": "constant",
        "name": f"constant batch {batch_size}",
        "batch_size": batch_size,
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ratios": {name: dataclasses.asdict(Ratio.between(speeds[name], speeds["off"])) for name in variants},
        "accept_length": {name: engine.stats.accept_length for name, engine in engines.items()},
        "strategy_steps": {
            name: {arm: s.num_steps for arm, s in engine.stats.by_strategy.items()}
            for name, engine in engines.items()
        },
    }


def over_off(measured: Mapping[str, Any]) -> str:
    """Returns a line with every variant's speed over off."""
    words = ", ".join(f"{name} {ratio_text(ratio)} times off" for name, ratio in measured["ratios"].items())
    return f"{measured['name']}: off {speed_text(measured['tokens_per_second']['off'])} tokens/s; {words}"


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    measurements = report["measurements"]
    names = list(measurements[0]["ratios"])
    rows = [
        [m["batch_size"], speed_text(m["tokens_per_second"]["off"])]
        + [f"{ratio_text(m['ratios'][n])}; accepts {number(m['accept_length'][n])}" for n in names]
        for m in measurements
    ]
    said = "Ratios above 1 are faster than off: geometric mean of paired rounds (95 % confidence interval)."
    batches = table(["batch", "off, tokens/s", *names], rows)
    return markdown("Rollout benchmark", report, said, "## Constant batch", batches)


def main() -> None:
    parser = make_parser("constant", __doc__)
    parser.add_argument(
        "config", type=Path, help="a run's configuration or recipe; --section.key VALUE overrides it"
    )
    parser.add_argument("--geometry", help="grow model and drafter (grown.py)")
    parser.add_argument(
        "--variants", type=words, default=("adaptive",), help="besides off: adaptive, 4x1x4, …"
    )
    parser.add_argument("--batches", type=words, default=("1", "4", "16"), help="batch sizes")
    parser.add_argument("--rounds", type=int, default=8, help="turns of every variant at each batch size")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    options, overrides = parser.parse_known_args()
    config = pin(load_config(options.config, overrides))
    for variant in options.variants:
        make_tuner(parse_speculation(variant), drafter_kinds(config.drafter.path is not None))
    preflight(config)
    growth = None if options.geometry is None else plan_growth(config, options.geometry)
    with grown_config(config, growth) as (config, geometry):
        measurements: list[dict[str, Any]] = []
        report = {**header(config, command_of(parser)), **geometry, "measurements": measurements}
        subject = Subject(config)
        for batch in map(int, options.batches):
            measurements.append(constant(subject, options.variants, batch, options.rounds, options.seconds))
            print(over_off(measurements[-1]), flush=True)
            write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("constant", main))
