"""Runs all parts, or some, and writes gpu.json and gpu.md into a folder after each (`make gpu`, `make
gpu-rehearse`)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.harness import Outcome, run_parts
from benchmarks.gpu.parts import SECONDS, parts_of_gpu, parts_of_rehearsal
from benchmarks.gpu.report import to_markdown
from benchmarks.report import write_report


def main() -> int:
    """Returns the exit code: 0, 1 where a part failed or ran out of time, 2 where nothing can be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder of gpu.json and gpu.md"
    )
    parser.add_argument("--only", default="", help="names of parts, or their beginnings, with commas between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="in small, on a CPU")
    options = parser.parse_args()
    known = parts_of_rehearsal() if options.rehearse else parts_of_gpu()
    wanted = [word for word in options.only.split(",") if word]
    unknown = [word for word in wanted if not any(part.name.startswith(word) for part in known)]
    if unknown:
        return _mistake(
            f"--only: {unknown[0]!r} is unknown; give some of {', '.join(part.name for part in known)}"
        )
    if not options.rehearse and not torch.cuda.is_available():
        return _mistake(
            "PyTorch finds no GPU here; run it on a machine that has one, or rehearse it: make gpu-rehearse"
        )
    parts = [part for part in known if not wanted or any(part.name.startswith(word) for word in wanted)]
    command = " ".join(
        ["python -m benchmarks.gpu", *(word for word in sys.argv[1:] if not word.startswith("/"))]
    )

    def note(outcomes: Sequence[Outcome]) -> None:
        last = outcomes[-1]
        print(f"{last.name}: {last.status}, {last.seconds:.1f} s of {last.limit:.0f}", flush=True)
        if last.status == "failed":
            print(last.output[-1500:], flush=True)
        report = {
            "command": command,
            "rehearsed": options.rehearse,
            "parts": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        write_report(options.out / "gpu", report, to_markdown(report, outcomes))

    outcomes = run_parts(parts, options.seconds, note)
    return int(any(outcome.status not in ("ok", "skipped") for outcome in outcomes))


def _mistake(line: str) -> int:
    print(f"benchmarks.gpu: error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
