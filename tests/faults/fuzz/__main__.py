"""Plays all cases, by as many processes as are asked for, and reports what became of them.

    python -m tests.faults.fuzz --out benchmarks/results/faults/fuzz    all of them
    python -m tests.faults.fuzz --only 17 300                           these alone, and prints them

Each case has its own generator, seeded by --seed and its number, so it can be played again alone. The kinds
take
turns: --num 100 plays some of each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported: a fuzzed name is asked of nobody
os.environ["NO_COLOR"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the launcher sets it, before torch is imported

import torch

from tests.faults.commands import adopt_orphans
from tests.faults.fuzz.judge import GOOD, try_one
from tests.faults.fuzz.kinds import KINDS, all_cases
from tests.faults.fuzz.sound import make_models, make_run, preload
from tests.faults.report import Text, begin, make_parser, write
from tests.faults.victim import fork_ranks

TOLD = ("words", "environ", "streams", "is_fresh", "about")
"""What is told of a case."""


def play(numbers: Sequence[int], seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Plays the cases with these numbers in this process; yields what became of each."""
    torch.set_num_threads(1)
    adopt_orphans()
    fork_ranks()
    kinds = all_cases()
    with tempfile.TemporaryDirectory() as folder:
        sound = make_models(Path(folder))
        preload(sound)
        make_run(sound)
        for number in numbers:
            kind, _ = KINDS[kinds[number]]
            outcome = try_one(kind, sound, random.Random(f"{seed}/{number}"), seconds)
            case = {key: value for key, value in asdict(outcome.case).items() if key in TOLD and value}
            yield {"number": number, "kind": kinds[number], **asdict(outcome), "case": case}


def play_in(
    num_processes: int, numbers: Sequence[int], seed: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Plays them in as many processes, each of which takes every so-many-th; yields what became of each,
    in no order."""
    words = [sys.executable, "-m", "tests.faults.fuzz", "--plays"]
    words += ["--seed", str(seed), "--seconds", str(seconds)]
    with ExitStack() as stack:
        said = []
        for place in range(num_processes):
            own = ["--only", *map(str, numbers[place::num_processes])]
            process = subprocess.Popen([*words, *own], stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            said.append(process.stdout)
        while said:
            for file in [*said]:
                if line := file.readline():
                    yield json.loads(line)
                else:
                    said.remove(file)


def report(options: argparse.Namespace) -> int:
    numbers = options.only or [*range(min(options.num or len(all_cases()), len(all_cases())))]
    began, played, failures = time.monotonic(), [], {}
    for one in play_in(min(options.processes, len(numbers)), numbers, options.seed, options.seconds):
        played.append(one)
        if one["what"] not in GOOD:
            failures[one["number"]] = one
        if one["what"] not in GOOD or options.only:
            print(one["number"], json.dumps(one, ensure_ascii=True)[:3000], flush=True)
    told: dict[str, Any] = {
        **begin(f"fuzz --num {len(numbers)} --seed {options.seed}"),
        "by_kind": by_kind(played),
        "total": counts(played),
        "seconds": round(time.monotonic() - began, 1),
        "failures": dict(sorted(failures.items())),
        "missing": sorted({*numbers} - {one["number"] for one in played}),
    }
    print(json.dumps({key: told[key] for key in ("total", "seconds", "missing")}))
    write(options.out, told, text_of(told))
    return int(bool(failures or told["missing"]))


def counts(played: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what became of some cases, in numbers."""
    what = Counter(one["what"] if one["what"] in GOOD else "faults" for one in played)
    seconds = [one["seconds"] for one in played]
    return {
        "cases": len(played),
        **{key: what[key] for key in (*GOOD, "faults")},
        "with_ranks": sum(one["with_ranks"] for one in played),
        "seconds": round(sum(seconds), 1),
        "longest": round(max(seconds, default=0.0), 1),
    }


def by_kind(played: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    grouped: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in played:
        grouped[one["kind"]].append(one)
    return {kind: counts(grouped[kind]) for kind in KINDS if kind in grouped}


def text_of(told: Mapping[str, Any]) -> Text:
    total = told["total"]
    text = (
        f"{total['cases']} cases, each a command in its own folder. {total['success']} ended well, "
        f"{total['refused']} were refused with exit code 2 and one line, and left neither a traceback nor a "
        f"process; {total['faults']} did not. In {total['with_ranks']} ranks started. The longest took "
        f"{total['longest']} s, all of them {told['seconds'] / 60:.0f} minutes."
    )
    rows = [[kind, *counted.values()] for kind, counted in [*told["by_kind"].items(), ("all", total)]]
    columns = ["kind", "cases", "ended well", "refused", "faults", "with ranks", "s", "longest, s"]
    return "Commands on damaged and absurd input", text, columns, rows


def main() -> None:
    parser = make_parser("fuzz", __doc__)
    parser.add_argument("--num", type=int, help="of cases, the first of all")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the cases to play alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180.0, help="after which a case hangs")
    parser.add_argument("--processes", type=int, default=2, help="that play cases side by side")
    parser.add_argument("--plays", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plays:
        for one in play(options.only, options.seed, options.seconds):
            print(json.dumps(one), flush=True)
        sys.exit(0)
    sys.exit(report(options))


if __name__ == "__main__":
    main()
