"""Compares a run that generates with vLLM with the same run that generates with TLT's own engine.

    python -m benchmarks.vllm_rl --out benchmarks/results/vllm-rl      with an interpreter that has vLLM
    python -m benchmarks.vllm_rl --recipe DIR/reasoning.toml --steps 10 --killed-steps 0 --out …     SmolLM2

    tlt     engine tlt, one rank
    vllm    engine vllm, one rank
    off     as vllm, without drafts
    killed  as vllm, but killed in the middle of a rollout and resumed from its journal

The recipe is made small, with one seed. All responses of every step are compared, token by token. The engines
add numbers in different orders, so a response may differ where two tokens are nearly as likely: transformers
computes the margin there, noise included, in float64 from the step's policy. The other arms then update with
the responses of tlt, so that every step of every arm begins with the same weights, bit for bit (their digests
are compared).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.command import command_of, make_parser
from benchmarks.report import environment, markdown, number, table, write_report
from tests.vllm.arms import ARMS, RECIPE, compare_arms, run_arm, small

# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────

FIGURES = {
    "reward": ("rewards/mean", ".3f"),
    "tokens": ("rollout/num_tokens", "d"),
    "rollout, s": ("rollout/seconds", ".1f"),
    "step, s": ("step_seconds", ".1f"),
}


def to_markdown(report: dict[str, Any]) -> str:
    by_arm = {run["arm"]: run["steps"] for run in report["runs"]}
    columns = ["step", *(f"{arm}: {name}" for name in FIGURES for arm in by_arm)]
    rows = []
    for index, steps in enumerate(zip_longest(*by_arm.values(), fillvalue={})):
        row = [number(step.get(key), form) for key, form in FIGURES.values() for step in steps]
        rows.append([index + 1, *row])
    found = [describe(found) for found in report["comparisons"]]
    title = "A run with vLLM beside the same run with our own engine"
    blocks = [report["configuration"], *found, times(by_arm), table(columns, rows)]
    return markdown(title, report, *blocks)


def times(by_arm: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table of the arms' times over those of vLLM without drafts, step by step."""
    rows = []
    for arm, steps in by_arm.items():
        cells = []
        for key in ("rollout/seconds", "step_seconds"):
            ratios = [off[key] / step[key] for off, step in zip(by_arm["off"], steps, strict=False)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")
        rows.append([arm, *cells])
    return table(["times vLLM without drafts, median of the steps (range)", "rollout", "step"], rows)


def describe(found: dict[str, Any]) -> str:
    """Returns a comparison in words."""
    steps = found["recalled_tokens"].items()
    recalled = ", ".join(f"{taken} tokens of step {int(step) + 1}" for step, taken in steps)
    from_journal = f" From the journal came {recalled}." if recalled else ""
    text = f"**{found['name']}**: {found['num_equal']} of {found['responses']} responses have the same tokens"
    text += f" ({found['num_tokens']} compared), and {found['same_policies']} of {found['steps']} steps began"
    text += f" with the same weights; log-probabilities are {found['logprob_gap']:.1e} apart at most."
    if differences := found["differences"]:
        num_ties = sum(each["is_near_tie"] for each in differences)
        worst = max(each["margin"] for each in differences)
        text += f" {num_ties} of {len(differences)} that part do so at a near-tie: the law's two tokens are"
        text += f" {worst:.1e} apart at most."
    return text + from_journal


def measure(options: argparse.Namespace, folder: Path, command: str) -> None:
    report: dict[str, Any] = {"command": command, "environment": environment(), "runs": [], "comparisons": []}
    changes = json.loads(options.keys)
    keys = {**small(options.recipe), **changes}
    del keys["run.time_limit_minutes"]
    said = ", ".join(f"{key} = {value}" for key, value in keys.items())
    name = f"{options.recipe.resolve().parent.name}/{options.recipe.name}"
    report["configuration"] = f"`{name}` with {said}; float32. Steps count from 1."
    for arm in ARMS:
        steps = options.killed_steps if arm == "killed" else options.steps
        if not steps:
            continue
        kill = f"{options.kill_step},{options.kill_after}"
        report["runs"].append(run_arm(arm, folder / arm, steps, kill, changes, options.recipe))
        print(arm, [round(step["rewards/mean"], 3) for step in report["runs"][-1]["steps"]], flush=True)
        if arm != "tlt":
            found = compare_arms(f"tlt and {arm}", folder / "tlt", folder / arm)
            report["comparisons"].append(found)
            print(describe(found), flush=True)
    write_report(options.out, report, to_markdown(report))


def main() -> None:
    parser = make_parser("vllm_rl", __doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="a recipe's TOML, which is made small")
    parser.add_argument("--keys", default="{}", help="further keys of the configuration, as JSON")
    parser.add_argument("--steps", type=int, default=20, help="policy updates")
    parser.add_argument(
        "--killed-steps", type=int, default=8, help="policy updates of the killed arm; 0: it is left out"
    )
    parser.add_argument("--kill-step", type=int, default=6, help="step in which it is killed, from 0 on")
    parser.add_argument("--kill-after", type=int, default=20, help="engine steps in it before that")
    parser.add_argument("--folder", type=Path, help="keeps the runs; ended ones are not run again")
    options = parser.parse_args()
    recipe = f"{options.recipe.resolve().parent.name}/{options.recipe.name}"  # wherever it lies
    command = command_of(parser).replace(str(options.recipe), recipe)
    if options.folder is not None:
        measure(options, options.folder, command)
        return
    with tempfile.TemporaryDirectory(prefix="tlt-rl-") as folder:
        measure(options, Path(folder), command)


if __name__ == "__main__":
    main()
