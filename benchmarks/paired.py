"""Is one tree slower than another? Two checkouts do the same work in turns, each in processes of its own.

    OUT=benchmarks/results/paired
    python -m benchmarks.paired BEFORE AFTER --what headline --rounds 5 --out $OUT-headline
    python -m benchmarks.paired BEFORE AFTER --what longtail --rounds 8 --out $OUT-longtail
    python -m benchmarks.paired BEFORE AFTER --what one-rank --rounds 4 --out $OUT-one-rank
    python -m benchmarks.paired BEFORE AFTER --what real --model smollm2 --rounds 8 --out $OUT-real

    headline   `tlt train recipes/countdown/headline.toml` without evaluations: all steps but the first
    longtail   one rollout of recipes/countdown/longtail.json, adaptive (paired_longtail.py)
    one-rank   the headline on one rank, where nothing is handed over and nobody is idle; both trees at once,
               each on a core of its own, which they change from round to round
    real       `tlt generate` with a real model (tlt init smollm2 DIR): 16 responses, as --speculation says

    round 0: before, after │ round 1: after, before │ …

The ratio is seconds of BEFORE over seconds of AFTER: above 1, AFTER is faster. Every round is one pair;
the interval is Student's t of the log ratios. Both trees have the same seed, so they write the same
tokens; in float32 a near-tie may fall the other way, and then the numbers of tokens, which the report
gives, differ a little.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from benchmarks.golden import Tree, write_sums
from tlt.bench.measure import Ratio, rounds_in_turns
from tlt.bench.report import environment, markdown, table, write_report
from tlt.report.record import read_metrics

CHILD = Path(__file__).with_name("paired_longtail.py")


@dataclass(frozen=True)
class Work:
    """One measurement of one tree."""

    seconds: float
    num_tokens: int


def headline(tree: Tree, num_steps: int, *overrides: str) -> Work:
    """Trains for some steps; the first one, in which a fresh process is slow, does not count."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        amounts = ("--run.num_steps", str(num_steps), "--evaluation.num_problems", "0", *overrides)
        tree.tlt("train", tree.recipe / "headline.toml", *amounts, "--run.out_dir", run)
        steps = read_metrics(run / "metrics.jsonl")[1:]
    return said(
        tree, Work(sum(step.step_seconds for step in steps), sum(step.rollout.num_tokens for step in steps))
    )


def longtail(tree: Tree) -> Work:
    """Generates the long tail's responses with a tuner that knows nothing."""
    return said(tree, Work(**tree.child(CHILD, tree.recipe)))


def real(tree: Tree, model: Path, speculation: str) -> Work:
    """Generates with the recipe smollm2's model and drafter."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words: list[str | Path] = [
            "--prompts",
            write_sums(tree, folder, 16),
            "--out",
            folder / "responses.jsonl",
        ]
        words += ["--chat", "true", "--max-tokens", "64", "--adapter", model / "warm-up"]
        words += ["--speculation", speculation]
        words += [] if speculation == "off" else ["--drafter", model / "drafter"]
        summary = tree.summary("generate", model / "base", *words)
    return said(tree, Work(summary["seconds"], summary["tokens"]))


def said(tree: Tree, work: Work) -> Work:
    print(f"{tree.commit}: {work.seconds:.2f} s", flush=True)
    return work


def side_by_side(
    trees: dict[str, Tree], measure: Callable[[Tree], Work], num: int
) -> Iterator[dict[str, list[Work]]]:
    """Every round measures both trees at once. Yields all that was measured, after each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(trees):
        sys.exit(f"one-rank: needs {len(trees)} cores, there is {len(cores)}")
    works: dict[str, list[Work]] = {name: [] for name in trees}

    def on_core(tree: Tree, core: int) -> Work:
        os.sched_setaffinity(0, {core})  # of this thread, and of what it starts
        return measure(tree)

    for index in range(num):
        with ThreadPoolExecutor(len(trees)) as pool:
            rotated = cores[index % 2 :] + cores[: index % 2]
            begun = [
                pool.submit(on_core, tree, core) for tree, core in zip(trees.values(), rotated, strict=False)
            ]
            for name, one in zip(trees, begun, strict=True):
                works[name].append(one.result())
        yield works


def describe(ratio: dict[str, Any]) -> str:
    """Returns a Ratio to three places: whole percents would hide what matters here."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} – {ratio['high']:.3f})"
    return f"{ratio['mean']:.3f}{interval}"


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    before, after = (report["trees"][name] for name in ("before", "after"))
    rows = [
        [
            f"{a['seconds']:.2f}",
            f"{b['seconds']:.2f}",
            f"{a['seconds'] / b['seconds']:.3f}",
            a["num_tokens"],
            b["num_tokens"],
        ]
        for a, b in zip(before["works"], after["works"], strict=True)
    ]
    seconds = [f"before ({before['commit']}), s", f"after ({after['commit']}), s"]
    figures = (
        f"Seconds before / seconds after: {describe(report['ratio'])}; above 1, the later tree is faster."
    )
    columns = [*seconds, "ratio", "tokens before", "tokens after"]
    return markdown(f"Two trees in turns: {report['what']}", report, figures, table(columns, rows))


def main() -> None:
    parser = make_parser("paired", __doc__)
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("after", type=Path, help="the checkout to judge")
    parser.add_argument("--what", choices=["headline", "longtail", "one-rank", "real"], required=True)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    parser.add_argument(
        "--steps", type=int, default=5, help="of headline and one-rank, per round; the first does not count"
    )
    parser.add_argument("--model", type=Path, help="of real: a folder of `tlt init smollm2`")
    parser.add_argument("--speculation", default="off", help="of real: off, adaptive or a strategy")
    options = parser.parse_args()
    if (options.what == "real") != (options.model is not None):
        parser.error("--model goes with --what real, which needs it")
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be 1 or more, --steps 2 or more")
    trees = {name: Tree(path) for name, path in (("before", options.before), ("after", options.after))}
    if options.what == "one-rank":
        rounds = side_by_side(
            trees, lambda tree: headline(tree, options.steps, "--run.num_ranks", "1"), options.rounds
        )
    else:
        measures: dict[str, Callable[[Tree], Work]] = {
            "longtail": longtail,
            "headline": partial(headline, num_steps=options.steps),
            "real": partial(real, model=options.model, speculation=options.speculation),
        }
        measure = measures[options.what]
        rounds = rounds_in_turns(
            {name: partial(measure, tree) for name, tree in trees.items()}, options.rounds
        )
    amounts = {"longtail": "", "real": f" --model smollm2 --speculation {options.speculation}"}
    amount = amounts.get(options.what, f" --steps {options.steps}")
    report: dict[str, Any] = {
        "command": f"{parser.prog} BEFORE AFTER --what {options.what} --rounds {options.rounds}{amount}",
        "environment": environment(),
        "what": options.what,
    }
    for works in rounds:  # an interrupted measurement keeps its whole rounds
        report["trees"] = {
            name: {"commit": tree.commit, "works": [dataclasses.asdict(work) for work in works[name]]}
            for name, tree in trees.items()
        }
        report["ratio"] = dataclasses.asdict(
            Ratio.of([a.seconds / b.seconds for a, b in zip(works["before"], works["after"], strict=True)])
        )
        write_report(options.out, report, to_markdown(report))
    print(f"seconds before / after: {describe(report['ratio'])}")


if __name__ == "__main__":
    main()
