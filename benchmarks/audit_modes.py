"""Makes benchmarks/results/audit.{json,md}: `tlt audit` on our engine in every mode, and on vLLM's responses.

python -m benchmarks.audit_modes --vllm FOLDER   # FOLDER/NAME.jsonl, as benchmarks/audit_vllm.py writes them; -t0: greedy
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from tlt.bench.report import environment, markdown, table, write_report
from tlt.cli.main import main as tlt

BASE, DRAFTER = "recipes/countdown/base", "recipes/countdown/drafter"
MODES = ("--speculation", "off,adaptive,4x1x4,3x2x5", "--drafter", DRAFTER)
OURS: tuple[tuple[str, ...], ...] = (
    ("--samples", "4", *MODES),
    ("--samples", "1", "--temperature", "0", *MODES),
    ("--samples", "2", "--temperature", "0.7", "--top-k", "8", "--top-p", "0.95", "--min-p", "0.01", *MODES),
    ("--samples", "4", "--dtype", "bfloat16"),
    ("--samples", "4", "--dtype", "bfloat16", "--tolerance", "0.05"),
    ("--samples", "4", "--speculation", "4x1x4", "--drafter", DRAFTER, "--plant-fault", "0.01"),
    (
        "--samples",
        "1",
        "--temperature",
        "0",
        "--speculation",
        "4x1x4",
        "--drafter",
        DRAFTER,
        "--plant-fault",
        "0.01",
    ),
)
SHOWN = ("--temperature", "--top-k", "--top-p", "--min-p", "--dtype", "--tolerance")


def main() -> None:
    parser = make_parser("audit_modes", __doc__, "benchmarks/results/audit")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--num", default="24")
    options = parser.parse_args()
    runs = [("--task", "countdown", "--num", options.num, *arguments) for arguments in OURS]
    if options.vllm is not None:
        paths = sorted(options.vllm.glob("vllm-*.jsonl"))
        runs = [
            ("--responses", str(path), *(("--temperature", "0") if path.stem.endswith("-t0") else ()))
            for path in paths
        ]
    for arguments in runs:
        save(run(arguments), options.out)


def save(results: list[dict[str, Any]], out: Path) -> None:
    path = out.with_suffix(".json")
    kept = json.loads(path.read_text(encoding="utf-8"))["audits"] if path.exists() else []
    commands = {result["command"] for result in results}
    results = [*(audit for audit in kept if audit["command"] not in commands), *results]
    ordered = sorted(results, key=lambda audit: "--task" not in audit["command"])
    report = {
        "command": "python -m benchmarks.audit_modes --vllm FOLDER",
        "environment": environment(),
        "audits": ordered,
    }
    write_report(out, report, to_markdown(report))


def run(arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    """The modes of one `tlt audit`, each with the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        code = tlt(("audit", BASE, *arguments, "--out", str(out)))
        assert code in (0, 1, 3), arguments
        modes = json.loads(out.read_text(encoding="utf-8"))["modes"]
    words = (Path(word).name if word.endswith(".jsonl") else word for word in arguments)
    command = " ".join(("tlt audit", BASE, *words))
    return [{"command": command, **mode, "offenders": mode["offenders"][:3]} for mode in modes]


def vllm_arguments(name: str) -> list[str]:
    """How the file vllm-METHOD[-repaired][-t0].jsonl was made."""
    _, method, *variants = name.removesuffix(".jsonl").split("-")
    samples = {"none": "8", "eagle3": "2"}.get(method, "4")
    drafter = {"eagle": ["--drafter", DRAFTER], "eagle3": ["--drafter", "random"]}.get(method, [])
    options = ["--temperature", "0"] if "t0" in variants else ["--samples", samples]
    return ["--method", method, *drafter, *options, *(["--repair-expand"] if "repaired" in variants else [])]


def verdict_of(mode: dict[str, Any]) -> str:
    """Returns the verdict by what was recorded: earlier audits called what was not convicted lossless."""
    needed = mode["tokens_for_power"].values()
    if mode["reasons"]:
        return "**not lossless**"
    return "lossless" if all(n is not None and n <= mode["num_tokens"] for n in needed) else "undecided"


def to_markdown(report: dict[str, Any]) -> str:
    rows = []
    for mode in report["audits"]:
        settings = (
            mode["command"].split(" --num ")[-1]
            if " --task " in mode["command"]
            else mode["command"].split(BASE)[-1]
        )
        words = settings.split()
        given = {key: value for key, value in itertools.pairwise(words) if key.startswith("--")}
        shown = [f"{key[2:]} {given[key]}" for key in SHOWN if key in given]
        columns = [mode["mode"].removesuffix(".jsonl"), ", ".join(shown) or "temperature 1", verdict_of(mode)]
        columns += [f"{mode['num_tokens']:,}", f"{mode['mean_tokens']:.1f}"]
        if mode["max_log10_e"] is None:
            columns += [f"{mode['num_wrong']} wrong, {mode['num_near_ties']} near-ties", "", ""]
        else:
            surprise, share = mode["surprise"], mode["elsewhere"]
            columns += [
                f"10^{mode['max_log10_e']:.1f}",
                f"{surprise['value']:+.4f} ({surprise['low']:+.4f} to {surprise['high']:+.4f})",
                f"{share['value']:.2%} ({share['low']:.2%} to {share['high']:.2%}), "
                f"{mode['elsewhere_source']}",
            ]
        rows.append(columns)
    powers = [
        f"- {mode['mode'].removesuffix('.jsonl')}, {fault}: {f'{tokens:,}' if tokens else 'over 5,000,000'}"
        for mode in report["audits"]
        for fault, tokens in mode["tokens_for_power"].items()
    ]
    paths = sorted({mode["mode"] for mode in report["audits"] if mode["mode"].startswith("vllm-")})
    vllm = f"    python benchmarks/audit_vllm.py {BASE} --prompts problems.jsonl --out"
    commands = [f"{vllm} {path} {' '.join(vllm_arguments(path))}" for path in paths]
    commands += dict.fromkeys(f"    {mode['command']}" for mode in report["audits"])
    columns = ["engine, mode", "settings", "verdict", "tokens", "mean length", "max e"]
    columns += ["log p + entropy, nats", "from elsewhere"]
    return markdown(
        "Which engines are lossless",
        report,
        "What the columns mean: [docs/audit.md](../../docs/audit.md)",
        table(columns, rows),
        "Tokens for 95 % power at alpha 1e-4:",
        "\n".join(powers),
        "Commands, after `tlt task countdown --num 96 --split test --out problems.jsonl`:",
        "\n".join(commands),
    )


if __name__ == "__main__":
    main()
