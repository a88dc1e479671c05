"""Measures what the host does in an engine step: a model so small that it computes hardly anything, at batch
1 to 128.

    python -m benchmarks.host_work --out RESULT                      # of this tree
    python -m benchmarks.host_work --before TREE --out RESULT        # beside another checkout, in turns

    arms         ms of an engine step; the slope is µs a row between the two largest batches; threshold 0:
                 chains of full depth
    retrieval    µs a row of proposing alone, for responses of that length; bytes of the index a token
    crossings    a step on a pretended GPU (tests/unit/engine/pretend_device.py): times that the host waited,
                 and that it sent something

Every round measures every tree once in a process of its own (host_work_child.py), in an order that turns;
medians of rounds are reported. Seconds are the thread's own, so a busy machine spoils little, but a core
shared with others is still slower. Toy attention grows with the batch, too, so a slope is an upper bound
of the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import make_parser
from benchmarks.golden import Tree
from tests.unit.engine.test_crossings import crossings_of_a_step
from tlt.bench.measure import in_turns
from tlt.bench.report import environment, markdown, table, write_report

CHILD = Path(__file__).with_name("host_work_child.py")
ARMS = ("off", "off+drafter", "adaptive", "ngram:4x1x4", "ngram:15x1x15", "learned:4x1x4", "learned:3x2x6")
CROSSING = ("off", "learned:4x1x4", "learned:15x1x15", "learned:3x2x6")

Round = Mapping[str, Any]
"""What one process measured, by the name of the cell."""


def medians(rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the median of every cell over the rounds."""

    def median(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: statistics.median(value[name] for value in values) for name in values[0]}
        return statistics.median(values)

    return {name: median([one[name] for one in rounds]) for name in rounds[0]}


def crossings(batches: Sequence[int]) -> dict[str, list[int]]:
    """Returns, by strategy and batch size, how often a step of this tree waits for the device and sends to
    it."""
    found = {}
    for strategy in CROSSING:
        for batch_size in batches:
            with pytest.MonkeyPatch.context() as patch:
                counted = crossings_of_a_step(patch, strategy, batch_size)
            found[f"{strategy} {batch_size}"] = [counted.down.total(), counted.up.total()]
    return found


def slope(cells: Mapping[str, Any], arm: str, batches: Sequence[int]) -> float:
    """Returns µs a row between the two largest batches."""
    *_, small, large = batches
    return 1e3 * float(cells[f"{arm} {large}"] - cells[f"{arm} {small}"]) / (large - small)


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    batches, trees = report["batches"], report["trees"]
    sides = " → ".join(f"{name} ({tree['commit']})" for name, tree in trees.items())
    rows = []
    for arm in report["arms"]:
        steps = [
            " → ".join(f"{tree['cells'][f'{arm} {size}']:.2f}" for tree in trees.values()) for size in batches
        ]
        slopes = " → ".join(f"{slope(tree['cells'], arm, batches):.0f}" for tree in trees.values())
        rows.append([arm, *steps, slopes])
    retrieval = [name for name in next(iter(trees.values()))["cells"] if name.startswith("retrieval")]
    units = ("µs a row", "bytes a token")
    found = [
        [name, *(" → ".join(f"{t['cells'][name][unit]:.0f}" for t in trees.values()) for unit in units)]
        for name in retrieval
    ]
    counted = [[name, *counts] for name, counts in report["crossings"].items()]
    return markdown(
        "The host's work in an engine step",
        report,
        f"Milliseconds of a step by batch size, {sides}; medians of {report['num_rounds']} rounds.",
        table(["arm", *(f"batch {size}" for size in batches), "µs a row"], rows),
        table(["retrieval: shape, tokens", *units], found),
        table(["on a pretended GPU: arm, batch", "the host waits", "the host sends"], counted),
    )


def main() -> None:
    parser = make_parser("host_work", __doc__)
    parser.add_argument("--before", type=Path, help="a checkout to measure beside this one")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of every tree")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), help="off, off+drafter, adaptive, or strategies"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 4, 16, 64, 128], help="in rising order, two at least"
    )
    options = parser.parse_args()
    if options.rounds < 1 or len(options.batches) < 2 or options.batches != sorted({*options.batches}):
        parser.error("--rounds must be 1 or more, --batches two or more in rising order")
    before = {} if options.before is None else {"before": Tree(options.before)}
    trees = {**before, "now": Tree(Path(__file__).parent.parent)}
    words = (" ".join(options.arms), " ".join(map(str, options.batches)))
    measured = in_turns(
        {name: partial(tree.child, CHILD, *words) for name, tree in trees.items()}, options.rounds
    )
    report = {
        "command": f"{parser.prog}{' --before BEFORE' if before else ''} --rounds {options.rounds}",
        "environment": environment(),
        "num_rounds": options.rounds,
        "arms": options.arms,
        "batches": options.batches,
        "trees": {
            name: {"commit": tree.commit, "cells": medians(measured[name]), "rounds": measured[name]}
            for name, tree in trees.items()
        },
        "crossings": crossings([4, 24]),
    }
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
