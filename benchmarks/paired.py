"""Is one tree slower than another? Two checkouts do the same work in turns, each in processes of its own.

    OUT=benchmarks/results/paired
    python -m benchmarks.paired BEFORE AFTER --what headline --rounds 5 --out $OUT-headline
    python -m benchmarks.paired BEFORE AFTER --what longtail --rounds 8 --out $OUT-longtail
    python -m benchmarks.paired BEFORE AFTER --what engine --speculation 3x1x3 --rounds 30 --out $OUT-engine
    python -m benchmarks.paired BEFORE AFTER --what real --model smollm2 --rounds 8 --out $OUT-real

    headline   `tlt train recipes/countdown/headline.toml` without evaluations: all steps but the first
    longtail   one rollout of recipes/countdown/longtail.json, adaptive (paired_longtail.py)
    engine     --batch responses of up to 64 tokens, by two processes that stay and are asked in turns: the most precise
    real       `tlt generate` with a real model (tlt init smollm2 DIR): 16 responses, as --speculation says

    round 0: before, after │ round 1: after, before │ …

The ratio is seconds of BEFORE over seconds of AFTER: above 1, AFTER is faster. Every round is one pair;
the interval is Student's t of the log ratios. Both trees have the same seed, so they write the same
tokens; in float32 a near-tie may fall the other way, and then the numbers of tokens, which the report
gives, differ a little.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from benchmarks.golden import Tree, write_sums
from benchmarks.report import environment, markdown, table, write_report
from benchmarks.turns import rounds_in_turns
from tlt.training.report.ratio import Ratio
from tlt.training.report.step_record import read_metrics

CHILD = Path(__file__).with_name("paired_longtail.py")
ENGINE = Path(__file__).with_name("paired_engine.py")


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


def resident(tree: Tree, model: Path | None, speculation: str, batch: int) -> Callable[[], Work]:
    """Starts a process that keeps this tree's engine, and returns what asks it. Its first two answers, in which
    a fresh process is slow, do not count."""
    process = tree.start("-P", ENGINE, model or tree.recipe, speculation, str(batch))

    def ask() -> Work:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        print(file=process.stdin, flush=True)
        return said(tree, Work(**json.loads(process.stdout.readline())))

    for _ in range(2):
        ask()
    return ask


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
    parser.add_argument("--what", choices=["headline", "longtail", "engine", "real"], required=True)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    parser.add_argument(
        "--steps", type=int, default=5, help="of headline, per round; the first does not count"
    )
    parser.add_argument("--model", type=Path, help="of real and engine: a folder of `tlt init smollm2`")
    parser.add_argument(
        "--speculation", default="off", help="of real and engine: off, adaptive or a strategy"
    )
    parser.add_argument("--batch", type=int, default=16, help="of engine: 1, 2, 3 or a multiple of 4")
    options = parser.parse_args()
    if options.what == "real" and options.model is None:
        parser.error("--what real needs --model")
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be 1 or more, --steps 2 or more")
    trees = {name: Tree(path) for name, path in (("before", options.before), ("after", options.after))}
    measures: dict[str, Callable[[Tree], Callable[[], Work]]] = {
        "longtail": lambda tree: partial(longtail, tree),
        "headline": lambda tree: partial(headline, tree, num_steps=options.steps),
        "real": lambda tree: partial(real, tree, options.model, options.speculation),
        "engine": lambda tree: resident(tree, options.model, options.speculation, options.batch),
    }
    measure = measures[options.what]
    rounds = rounds_in_turns({name: measure(tree) for name, tree in trees.items()}, options.rounds)
    model = "" if options.model is None else " --model smollm2"
    of_engine = f"{model} --speculation {options.speculation}"
    of_engine += f" --batch {options.batch}" if options.what == "engine" else ""
    amounts = {"longtail": "", "headline": f" --steps {options.steps}"}
    amount = amounts.get(options.what, of_engine)
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
