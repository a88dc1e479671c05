"""Reads the options and writes the report of a proof of this folder: a text, and a table of what was
played."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.base.io.files import dumps, with_folder
from tlt.training.report.versions import environment

Text = tuple[str, str, Sequence[str], Iterable[Sequence[Any]]]
"""Title, text, and the table's columns and rows."""
Play = Callable[[int, int], Iterator[tuple[str, str]]]


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m tests.faults.NAME`, which writes where --out is given."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.faults.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="results go to OUT.json and OUT.md")
    return parser


def begin(words: str) -> dict[str, Any]:
    """Returns the beginning of a report. words: those behind `python -m tests.faults.`."""
    return {"command": f"python -m tests.faults.{words}", "environment": environment()}


def write(out: Path | None, report: Mapping[str, Any], text: Text) -> None:
    """Writes OUT.json and OUT.md; None: nothing."""
    if out is not None:
        title, words, columns, rows = text
        machine = ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value)
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows)]
        blocks = [f"# {title}", f"`{report['command']}`", machine, words, "\n".join(lines)]
        with_folder(out).with_name(f"{out.name}.json").write_text(dumps(report) + "\n")
        out.with_name(f"{out.name}.md").write_text("\n\n".join(blocks) + "\n")


def tally(name: str, doc: str | None, play: Play, good: Sequence[str]) -> int:
    """Plays seeded mutations, writes what became of each kind into OUT.json, and returns the exit code.

    play: given the number of mutations and a seed, yields (kind, outcome).
    good: the outcomes that are no failure.
    """
    parser = make_parser(name, doc)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, outcome in play(options.num, options.seed):
        by_kind[kind][outcome] += 1
    total = sum(by_kind.values(), Counter[str]())
    report = {
        **begin(f"{name} --num {options.num} --seed {options.seed}"),
        "total": total,
        "failures": sum(num for outcome, num in total.items() if outcome not in good),
        "by_kind": by_kind,
    }
    if options.out is not None:
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(json.dumps({key: report[key] for key in ("total", "failures")}))
    return int(bool(report["failures"]))
