"""Published configurations of many families, shrunk with all their flags, beside transformers' own models of the
same random weights.

python -m benchmarks.families --out RESULT [--only NAME,NAME]
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_of, make_parser, words
from benchmarks.report import environment, markdown, table, write_report
from tests.unit.models import compared
from tests.unit.models.families import EVERY
from tests.unit.models.test_any import own_config
from tlt.base.types import UserError
from tlt.models.any_config import AnyConfig
from tlt.models.hf.config import OtherComputation
from tlt.models.hf.families import parse_any
from tlt.models.hf.weights import count_parameters


def published(name: str) -> AnyConfig:
    """The configuration in its own size. Lists by layer are kept in short, as their pattern."""
    raw = dict(EVERY[name])
    num_layers = raw["num_hidden_layers"]
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(raw.get(key), list):
            raw[key] = (raw[key] * num_layers)[:num_layers]
    if raw["model_type"] == "gpt_oss":
        raw.pop("quantization_config")  # its weights in bfloat16 have none
    return parse_any(raw, name)


def kinds_of_attention(config: AnyConfig, raw: Mapping[str, Any]) -> str:
    windows = [window for window in config.windows if window is not None]
    said = f"{len(windows)} of {config.num_layers} layers see {windows[0]:,} tokens" if windows else "full"
    caps = (
        [f"scores capped at {raw['attn_logit_softcapping']:g}"] if raw.get("attn_logit_softcapping") else []
    )
    sinks = ["sinks"] if raw["model_type"] == "gpt_oss" else []
    experts = [f"{config.num_experts} experts"] if config.num_experts else []
    return ", ".join([said, *caps, *sinks, *experts])


def measure(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "model_type": EVERY[name]["model_type"]}
    try:
        config = published(name)
    except (OtherComputation, UserError) as refusal:
        return {**found, "refused": str(refusal)}
    began = time.perf_counter()
    found["attention"] = kinds_of_attention(config, EVERY[name])
    found["parameters"] = count_parameters(config)
    found["own"] = own_config(name) is not None
    for dtype in (torch.float64, torch.float32):
        result = compared.generated(name, dtype)
        key = str(dtype).removeprefix("torch.")
        found[key] = {"logprob_gap": result.logprob_gap, "greedy_gap": result.greedy_gap}
        found[key] |= {"other": result.num_other, "responses": result.num_responses}
    found["other_by_eagle"] = compared.num_other_by_eagle(name)
    found["gradient_error"] = compared.gradient_error(name)
    found["adapter_gap"] = compared.adapter_gap(name)
    with tempfile.TemporaryDirectory() as folder:
        found["saved_otherwise"] = compared.differing_tensors_when_saved_again(name, Path(folder))
    return {**found, "seconds": time.perf_counter() - began}


def row(m: Mapping[str, Any]) -> list[object]:
    gaps: list[object] = [f"{m[kind]['logprob_gap']:.0e}" for kind in ("float64", "float32")]
    num = m["float64"]["responses"]
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
    "float64, float32: log-probabilities off transformers', at most (gpt-oss and Gemma 2 round to float32 there). "
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
