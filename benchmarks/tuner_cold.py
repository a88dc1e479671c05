"""How fast a tuner that knows nothing is, beside no speculation: thousands of cold starts on simulated
machines.

    python -m benchmarks.tuner_cold --out RESULT [--before RESULT.json]        # writes RESULT.json and RESULT.md

Every cell of the table is a profile of costs, a drafter, a batch size and a length of responses; each of
its seeds is a cold start with noise of its own. `--before` puts another result's figures beside, such as
those of an older commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import environment, write_report
from tests.unit.speculation.tuner.cold_machines import (
    DRAFTERS,
    PROFILES,
    Machine,
    best_fixed,
    run_batch,
    settled_speed,
)
from tlt.base.speculation import Adaptive
from tlt.base.strategy import Strategy
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import Fixed, make_tuner

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (100, 1000)
SETTLED_AFTER, SETTLED_STEPS = 30.0, 400
"""The seconds after which a tuner should have settled, and the steps over which it is then judged."""


def cold_tuner(machine: Machine) -> StrategyTuner:
    tuner = make_tuner(Adaptive(), machine.drafter.kinds, prior=machine.profile.prior)
    assert tuner is not None
    return tuner


def cold_starts(profile: str, drafter: str, batch_size: int, max_tokens: int, seeds: range) -> dict[str, Any]:
    """Returns one cell: times off of each cold start, and of the arm that is best on average."""
    machines = [Machine(PROFILES[profile], DRAFTERS[drafter], seed) for seed in seeds]
    off = run_batch(
        Machine(PROFILES[profile], DRAFTERS[drafter]), Fixed(Strategy.OFF), batch_size, max_tokens
    )
    times = [off / run_batch(machine, cold_tuner(machine), batch_size, max_tokens) for machine in machines]
    arm = best_fixed(PROFILES[profile], DRAFTERS[drafter], batch_size)
    best = off / run_batch(Machine(PROFILES[profile], DRAFTERS[drafter]), Fixed(arm), batch_size, max_tokens)
    return {"times": [round(t, 4) for t in times], "best_arm": str(arm), "best": round(best, 4)}


def settled(profile: str, drafter: str, batch_size: int, seeds: range) -> list[float]:
    shares = []
    for seed in seeds:
        machine = Machine(PROFILES[profile], DRAFTERS[drafter], seed)
        tuner = cold_tuner(machine)
        shares.append(settled_speed(machine, tuner, batch_size, SETTLED_AFTER, SETTLED_STEPS))
    return [round(share, 4) for share in shares]


def seconds_of_a_choice(batch_size: int, num_steps: int = 300) -> float:
    """Returns what `choose` and `observe` take together for an engine step that decides anew: the median
    of many."""
    machine = Machine(PROFILES["0.5B"], DRAFTERS["good"])
    tuner = cold_tuner(machine)
    spent, steps = 0.0, list[float]()

    class Timed(StrategyTuner):
        def choose(self, batch: Any) -> Strategy:
            nonlocal spent
            start = time.perf_counter()
            strategy = tuner.choose(batch)
            spent = time.perf_counter() - start
            return strategy

        def observe(self, *seen: Any) -> None:
            start = time.perf_counter()
            tuner.observe(*seen)
            steps.append(spent + time.perf_counter() - start)

    settled_speed(machine, Timed(), batch_size, 1e9, num_steps // 4)
    return float(np.median(steps))


def measure(seeds: range, batches: Sequence[int]) -> dict[str, Any]:
    cells = []
    for profile in PROFILES:
        for drafter in DRAFTERS:
            for batch_size in batches:
                cell: dict[str, Any] = {"profile": profile, "drafter": drafter, "batch": batch_size}
                for length in LENGTHS:
                    cell[str(length)] = cold_starts(profile, drafter, batch_size, length, seeds)
                cell["settled"] = settled(profile, drafter, batch_size, seeds)
                cells.append(cell)
            print(f"{profile}, {drafter}: done", file=sys.stderr)
    return {
        "num_seeds": len(seeds),
        "first_seed": seeds.start,
        "cells": cells,
        "seconds_of_a_choice": {b: seconds_of_a_choice(b) for b in (1, 16, 64)},
    }


def spread(values: list[float]) -> str:
    """Returns the median, and the lowest in brackets."""
    return f"{np.median(values):.2f} ({min(values):.2f})"


def render(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    known = {} if before is None else {(c["profile"], c["drafter"], c["batch"]): c for c in before["cells"]}
    columns = [f"{length} tokens{when}" for length in LENGTHS for when in ("", ", before")[: 1 + bool(known)]]
    columns += ["best arm", "it alone, 100 | 1000", "settled", "settled, before"][: 3 + bool(known)]
    lines = [
        f"Times off of {result['num_seeds']} cold starts (seeds from {result['first_seed']}): the median, "
        "and the lowest in",
        "brackets. Settled: speed over the best",
        f"arm's, after {SETTLED_AFTER:g} s or {3 * SETTLED_STEPS:,} steps of a full batch.",
        "",
        f"| profile | drafter | batch | {' | '.join(columns)} |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for cell in result["cells"]:
        other = known.get((cell["profile"], cell["drafter"], cell["batch"]))
        row = [cell["profile"], cell["drafter"], str(cell["batch"])]
        for length in map(str, LENGTHS):
            row += [spread(one[length]["times"]) for one in (cell, other) if one]
        row += [cell["100"]["best_arm"], f"{cell['100']['best']:.2f} | {cell['1000']['best']:.2f}"]
        row += [spread(one["settled"]) for one in (cell, other) if one]
        lines.append(f"| {' | '.join(row)} |")
    for name, one in (("", result), ("before, ", before)):
        if one:
            took = ", ".join(f"{1000 * s:.2f} at batch {b}" for b, s in one["seconds_of_a_choice"].items())
            lines += ["", f"Choosing and observing, {name}ms of an engine step that decides anew: {took}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10, help="cold starts of every cell")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=0,
        help="seeds from here on: other ones than constants were tuned on",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--before", type=Path, help="a result whose figures stand beside")
    args = parser.parse_args()
    before = None if args.before is None else json.loads(args.before.read_text(encoding="utf-8"))
    result = {
        "environment": environment(),
        **measure(range(args.first_seed, args.first_seed + args.seeds), args.batches),
    }
    write_report(args.out, result, render(result, before))


if __name__ == "__main__":
    main()
