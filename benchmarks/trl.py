"""TRL alone, TRL with TLT's rollout function, TLT alone: the same prompts and lengths, in turns.

    python -m benchmarks.trl --responses 16 --max-tokens 512 --rounds 3 --out benchmarks/results/trl/two-ranks

    round 0: trl-tlt, trl, tlt │ round 1: tlt, trl, trl-tlt │ …          every arm in processes of its own, started by torchrun

A round's arm takes `--steps` steps after one that does not count: generate, score, update. The learning
rate is too small to change a weight, so that all arms generate from the base model. TRL with TLT and TLT
alone draw by the same keys, hence the same tokens (near-ties in float32 aside). TRL alone draws by transformers,
from probabilities of which only that of TLT's token is left: the same turns, calls and lengths. In turns with tools TLT alone tells the policy of a
failed call otherwise than TRL, so that it may have other tokens: the report counts them.
Needs TRL (pip install '.[trl]').

--products FOLDER: in place of Countdown, products by a tool (products.py), with the model and drafter in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import command_of, make_parser, words
from benchmarks.report import environment, markdown, ratio_text, table, write_report
from benchmarks.turns import in_turns
from tlt.training.report.ratio import Ratio

NAMES = {"trl": "TRL alone", "trl-tlt": "TRL with TLT", "tlt": "TLT alone"}
WORKER = "benchmarks.trl_worker"


@dataclass(frozen=True)
class Job:
    """What a worker is to do. arm: one of NAMES.
    tokens: file of the responses, written by the first arm, read by trl.
    products: folder of base/ and drafter/; None: Countdown's."""

    arm: str
    responses: int
    max_tokens: int
    steps: int
    tokens: str
    out: str
    products: str | None

    @property
    def group(self) -> int:
        """Responses to a prompt."""
        return 8 if self.products is None else 4


@dataclass(frozen=True)
class Measured:
    """One arm in one round: seconds of each counted step, of its rollout (the slowest rank's), and its
    response tokens."""

    arm: str
    step_seconds: tuple[float, ...]
    rollout_seconds: tuple[float, ...]
    num_tokens: tuple[int, ...]


def run_arm(job: Job, ranks: int) -> Measured:
    """Runs an arm in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [
        "--standalone",
        "--module",
        WORKER,
        json.dumps(asdict(job)),
    ]  # its folder would hide TRL behind this file
    root = str(Path(__file__).parents[1])
    inherited = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, cwd=root, env=inherited, capture_output=True, text=True, check=False)
    if not Path(job.out).exists():
        sys.exit(f"{job.arm}: ended with exit code {done.returncode}\n{done.stderr[-4000:]}")
    measured = json.loads(Path(job.out).read_text())
    return Measured(
        job.arm, *(tuple(measured[name][1:]) for name in ("step_seconds", "rollout_seconds", "num_tokens"))
    )


def take_turns(options: argparse.Namespace) -> list[list[Measured]]:
    """Every round measures all arms once. TRL alone takes over the tokens of the first arm."""
    with tempfile.TemporaryDirectory() as folder:

        def measure(arm: str) -> Measured:
            out, tokens = Path(folder) / f"{arm}.json", Path(folder) / "tokens.json"
            out.unlink(missing_ok=True)
            amounts = (options.responses, options.max_tokens, options.steps + 1)
            job = Job(arm, *amounts, str(tokens), str(out), options.products)
            measured = run_arm(job, options.ranks)
            print(f"{NAMES[arm]}: {sum(measured.step_seconds):.1f} s", flush=True)
            return measured

        measured = in_turns({arm: partial(measure, arm) for arm in options.arms}, options.rounds)
    return [list(of_round) for of_round in zip(*measured.values(), strict=True)]


def summarize(rounds: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """Returns a row for each arm: medians over rounds and steps, and the ratios of TRL alone's seconds to
    its, by rounds."""
    rows = []
    for arm in [arm for arm in NAMES if arm in {m.arm for m in rounds[0]}]:
        own = [m for measured in rounds for m in measured if m.arm == arm]
        steps, rollouts, tokens = (
            [value for m in own for value in getattr(m, name)] for name in list(asdict(own[0]))[1:]
        )
        ratios = {
            f"{what}_speedup": asdict(Ratio.of([total["trl"] / total[arm] for total in totals]))
            for what in ("step", "rollout")
            for totals in [
                [{m.arm: sum(getattr(m, f"{what}_seconds")) for m in measured} for measured in rounds]
            ]
        }
        row = {
            "arm": arm,
            "step_seconds": median(steps),
            "rollout_seconds": median(rollouts),
            "num_tokens": median(tokens),
        }
        rows.append({**row, "tokens_per_second": sum(tokens) / sum(rollouts), **ratios})
    return rows


def arms_table(arms: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows of `summarize` as a table."""
    columns = (
        "",
        "step, s",
        "rollout, s",
        "response tokens",
        "tokens/s in rollouts",
        "step: TRL alone / this (95 %)",
        "rollout",
    )
    rows = [
        (
            NAMES[row["arm"]],
            f"{row['step_seconds']:.2f}",
            f"{row['rollout_seconds']:.2f}",
            f"{row['num_tokens']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            ratio_text(row["step_speedup"]),
            ratio_text(row["rollout_speedup"]),
        )
        for row in arms
    ]
    return table(columns, rows)


def report_text(report: Mapping[str, Any]) -> str:
    subject = "Products by a tool, SmolLM2-135M" if report["products"] else "Countdown base model"
    about = f"{report['responses']} responses of at most {report['max_tokens']} tokens a step, {report['ranks']} ranks"
    return markdown("TRL beside TLT", report, f"{subject}, {about}; medians.", arms_table(report["rows"]))


def main() -> None:
    parser = make_parser("trl", __doc__)
    parser.add_argument("--responses", type=int, default=16, help="responses of a step, over all ranks")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of an arm in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", type=words, default=("trl-tlt", "trl", "tlt"), help="trl is not the first")
    parser.add_argument("--products", metavar="FOLDER", help="of base/ and drafter/: products by a tool")
    options = parser.parse_args()
    group = Job("", 0, 0, 0, "", "", options.products).group
    if options.responses % (group * options.ranks):
        found = f"{options.responses} are not groups of {group} on {options.ranks} ranks"
        parser.error(f"--responses: {found}; give a multiple")
    if options.arms[0] == "trl" or not {"trl", *options.arms} <= NAMES.keys() or "trl" not in options.arms:
        parser.error("--arms: give trl and others of trl-tlt, tlt, of which one comes first")
    rounds = take_turns(options)
    described = {**environment(), "trl": version("trl"), "transformers": version("transformers")}
    report = {
        "command": command_of(parser),
        "environment": described,
        **vars(options),
        "out": options.out.name,
    }
    report |= {"rows": summarize(rounds), "rounds": [[asdict(m) for m in measured] for measured in rounds]}
    write_report(options.out, report, report_text(report))
    print(report_text(report))


if __name__ == "__main__":
    main()
