"""The long tail in vLLM: alone, with its own speculation, with our law and tuner inside, and our own engine
beside it.

    python -m benchmarks.vllm_longtail --vllm PYTHON --rounds 5 --out benchmarks/results/vllm-longtail

Every arm is a process that stays alive and does the same responses when it is told to, in turns
(vllm_longtail_worker.py). With the law inside, and in our engine, the responses end by themselves. vLLM's
own sampling draws other tokens: it is made to generate as many, response by response. PYTHON: an
interpreter with both vLLM and tlt, as `make vllm-test` sets one up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from benchmarks.longtail import hash_model, read_workload
from tlt.bench.measure import Ratio, rounds_in_turns
from tlt.bench.report import environment, markdown, number, ratio_text, table, write_report
from tlt.cli.drafter import DrafterExport, export

WORKER = Path(__file__).with_name("vllm_longtail_worker.py")
RECIPE = Path("recipes/countdown")
ARMS = (
    "vllm-off",
    "vllm-3",
    "vllm-schedule",
    "law-off",
    "law-2",
    "law-4",
    "law-6",
    "law-adaptive",
    "tlt-adaptive",
)


class Arm:
    """A process that measures one arm. It is asked for a round by a line, and answers with one."""

    def __init__(self, python: Path, name: str, job: Path) -> None:
        self.name = name
        inherited = os.environ | {
            "PYTHONPATH": str(Path.cwd()),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(python), "-P", str(WORKER), name, str(job)]
        self.process = subprocess.Popen(
            command, env=inherited, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._read()

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        measured = self._read()
        print(f"{self.name}: {measured['seconds']:.2f} s", flush=True)
        return measured

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # vLLM prints there, too
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit(f"{self.name}: its process ended with exit code {self.process.wait()}")


def main() -> None:
    parser = make_parser("vllm_longtail", __doc__, "benchmarks/results/vllm-longtail")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter with vLLM and tlt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS), help="which, with commas between")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    options = parser.parse_args()
    base = RECIPE / "base"
    workload = read_workload(RECIPE / "longtail.json", hash_model(base))
    with tempfile.TemporaryDirectory() as folder:
        exported, job = Path(folder) / "eagle", Path(folder) / "job.json"
        asked = {"drafter": RECIPE / "drafter", "target": base, "to": exported, "format": "vllm-eagle"}
        export(DrafterExport.model_validate(asked))
        described = {
            "model": str(base),
            "drafter": str(RECIPE / "drafter"),
            "exported": str(exported),
            "eager": options.eager,
        }
        job.write_text(json.dumps({**described, "workload": str(RECIPE / "longtail.json")}), encoding="utf-8")
        arms = [Arm(options.vllm, name, job) for name in options.arms.split(",")]
        try:  # an interrupted measurement keeps its whole rounds
            for rounds in rounds_in_turns({arm.name: arm.run for arm in arms}, options.rounds):
                report = report_of(options, workload.num_tokens, str(workload.shape), arms, rounds)
                write_report(options.out, report, to_markdown(report))
        finally:
            for arm in arms:
                arm.close()
    print(to_markdown(report))


def report_of(
    options: argparse.Namespace,
    num_tokens: int,
    lengths: str,
    arms: list[Arm],
    rounds: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    seconds = {name: [one["seconds"] for one in measured] for name, measured in rounds.items()}
    first = next(iter(seconds))
    amount = f"--rounds {len(seconds[first])}" + (" --eager" if options.eager else "")
    return {
        "command": f"python -m benchmarks.vllm_longtail --vllm PYTHON --arms {options.arms} {amount}",
        "environment": environment(),
        "num_tokens": num_tokens,
        "lengths": lengths,
        "vllm": next((arm.ready["vllm"] for arm in arms if arm.ready["vllm"]), None),
        "arms": [
            {
                "name": name,
                "seconds": seconds[name],
                "accept_length": measured[-1]["accept_length"],
                "token_hash": measured[-1]["token_hash"],
                "over_first": vars(Ratio.between(seconds[first], seconds[name])),
            }
            for name, measured in rounds.items()
        ],
    }


def to_markdown(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    first = report["arms"][0]["name"]
    hashes = [arm["token_hash"] for arm in report["arms"] if arm["token_hash"]]
    rows = []
    for arm in report["arms"]:
        median = sorted(arm["seconds"])[len(arm["seconds"]) // 2]
        same = "–" if not arm["token_hash"] else "yes" if arm["token_hash"] == hashes[0] else "no"
        speed = f"{report['num_tokens'] / median:,.0f}"
        rows.append(
            [
                arm["name"],
                f"{median:.2f}",
                speed,
                ratio_text(arm["over_first"]),
                number(arm["accept_length"]),
                same,
            ]
        )
    columns = ["arm", "median seconds", "tokens/s", f"times {first}", "accept length", "the law's tokens"]
    return markdown(
        "The long tail in vLLM",
        report,
        f"vLLM {report['vllm']}; {report['num_tokens']:,} tokens, {report['lengths']}; float32, one thread, "
        "batch 128.",
        "`vllm-*`: vLLM's own sampling; off, EAGLE at a fixed length, or by a schedule of batch sizes. "
        "`law-*`: our law in"
        " vLLM; off, fixed lengths, our tuner. `tlt-*`: our own engine. Arms stay alive and work in turns. "
        "Ratios: the"
        " geometric mean of paired rounds with a 95 % interval.",
        table(columns, rows),
    )


if __name__ == "__main__":
    main()
