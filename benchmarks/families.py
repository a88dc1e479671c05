"""Published configurations of many families, shrunk with all their flags, beside transformers' own models of the
same random weights.

python -m benchmarks.families --out RESULT [--only NAME,NAME]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.command import command_of, make_parser, words
from benchmarks.report import environment, markdown, table, write_report
from tests.unit.models.families import EVERY
from tests.unit.models.measured import measure


def row(m: Mapping[str, Any]) -> list[object]:
    gaps: list[object] = [f"{m[kind]['logprob_gap']:.0e}" for kind in ("float64", "float32")]
    trees = "vLLM generates"
    if (num := m["float64"].get("responses")) is not None:
        equal = num - m["float64"]["other"], num - m["float32"]["other"], num - m["other_by_eagle"]
        trees = f"{equal[0]}, {equal[1]}; {equal[2]} of {num}"
    path = "own, any" if m["own"] else "any"
    saved = ", ".join(m["saved_otherwise"]) or "as it was"
    size = f"{m['parameters'] / 1e9:.2f}"
    checks: list[object] = [f"{m['gradient_error']:.0e}", f"{m['adapter_gap']:.0e}", saved]
    return [m["name"], m["attention"], size, path, *gaps, trees, *checks]


HEAD = [
    "configuration", "attention as published", "10⁹ parameters", "computed by", "float64", "float32",
    "equal with trees; EAGLE", "gradient", "adapters", "saved again",
]  # fmt: skip
SAID = (
    "Shrunk to 4 layers with all flags, random weights, positions beyond windows and a rope's original length. "
    "float64, float32: log-probabilities off transformers', at most (gpt-oss, Gemma 2 and Llama 4 round to float32 there). "
    "Trees: responses equal to those without drafts, in float64, in float32, and with a random EAGLE drafter in float64. "
    "Gradient: of packed sequences, relative, the worst tensor. Adapters: LoRA of every matrix, merged against beside, logits."
)  # fmt: skip


def to_markdown(report: Mapping[str, Any]) -> str:
    computed = [m for m in report["measurements"] if "refused" not in m]
    refused = [[m["name"], m["refused"]] for m in report["measurements"] if "refused" in m]
    tables = [table(HEAD, map(row, computed))]
    tables += ["## Refused", table(["configuration", "said"], refused)] if refused else []
    return markdown("Families of decoders", report, SAID, *tables)


def main() -> None:
    parser = make_parser("families", __doc__)
    parser.add_argument("--only", type=words, default=(), help="names of configurations")
    options = parser.parse_args()
    names = [name for name in EVERY if not options.only or name in options.only]
    measurements: list[dict[str, Any]] = []
    report = {"command": command_of(parser), "environment": environment(), "measurements": measurements}
    for name in names:
        measurements.append(measure(name))
        print(json.dumps(measurements[-1]), flush=True)
        write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()
