"""Tokens per second at constant batch sizes, of off and of the variants, in turns.

python -m benchmarks.constant countdown --out RESULT --variants adaptive,4x1x4 --batches 1,4,16
python -m benchmarks.constant countdown --out RESULT --geometry qwen2.5-0.5b     # grown.py
python -m benchmarks.constant countdown --out RESULT --variants adaptive,off,4x1x4 --cold
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


def cold_batch(
    engine_of: Callable[[str], RolloutBackend],
    names: Sequence[str],
    supply: Callable[[int], Sequence[Request]],
    batch_size: int,
    num_rounds: int,
    seconds: float,
) -> tuple[dict[str, RolloutBackend], dict[str, list[float]]]:
    """As `constant_batch`, but each turn has a fresh engine, whose tuner knows neither costs nor acceptance, and each
    round requests of its own. Returns the last engines, too."""
    last: dict[str, RolloutBackend] = {}
    begun = dict.fromkeys(names, 0)

    def turn(name: str) -> float:
        if name in last:
            last[name].close()
        last[name] = engine_of(name)
        begun[name] += 1
        return _Stretch(last[name], supply, batch_size, num_taken=1000 * begun[name]).run(seconds)

    for name in names:  # what is compiled or read at first use counts for none
        turn(name)
        begun[name] = 0
    return last, in_turns({name: partial(turn, name) for name in names}, num_rounds)


def constant(
    subject: Subject,
    variants: Sequence[str],
    batch_size: int,
    num_rounds: int,
    seconds: float,
    is_cold: bool = False,
) -> dict[str, Any]:
    """Measures every variant's tokens per second over off's at this batch size. seconds: of each turn."""
    names, num = list(dict.fromkeys(("off", *variants))), max(batch_size, 8)

    def supply(i: int) -> Sequence[Request]:
        return subject.requests(i, num)

    if is_cold:
        engines, speeds = cold_batch(
            lambda name: subject.engine(name, batch_size), names, supply, batch_size, num_rounds, seconds
        )
    else:
        engines = {name: subject.engine(name, batch_size) for name in names}
        speeds = constant_batch(engines, supply, batch_size, num_rounds, seconds)
    for engine in engines.values():
        engine.close()
    fixed = [name for name in names if name != "adaptive"]
    best = max(fixed, key=lambda name: statistics.mean(speeds[name]))
    return {
        "kind": "constant",
        "is_cold": is_cold,
        "best_fixed": best,
        "over_best_fixed": {
            name: dataclasses.asdict(Ratio.between(speeds[name], speeds[best]))
            for name in names
            if name not in fixed
        },
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
    parts = ["## Constant batch", batches]
    if any(m["best_fixed"] != "off" for m in measurements):
        heads = ["batch", "fastest fixed strategy, in hindsight", "adaptive over it"]
        rows = [
            [m["batch_size"], m["best_fixed"], *map(ratio_text, m["over_best_fixed"].values())]
            for m in measurements
        ]
        cold = "each turn a fresh engine, its tuner cold" if measurements[0]["is_cold"] else "tuner warm"
        parts += [f"## Beside fixed strategies ({cold})", table(heads, rows)]
    return markdown("Rollout benchmark", report, said, *parts)


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
    parser.add_argument("--cold", action="store_true", help="a fresh engine each turn")
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
            measured = constant(
                subject, options.variants, batch, options.rounds, options.seconds, options.cold
            )
            measurements.append(measured)
            print(over_off(measurements[-1]), flush=True)
            write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("constant", main))
