"""One table from the arms of a rollout benchmark: accept length and speed by drafter, shape, ranking and temperature.

python -m benchmarks.rollout recipes/countdown/quickstart.toml --out X --parts arms --batches 1,8 --temperatures 0,0.6,1
python -m benchmarks.drafting_table X.json benchmarks/results/drafting
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: Path, out: Path) -> None:
    report = json.loads(source.read_text())
    measured = [m for m in report["measurements"] if m["kind"] == "arms"]
    for m in measured:
        del m["steps"]  # single steps are of use to replays alone
    columns = [(m["batch_size"], m["temperature"], m["ranking"]) for m in measured]
    names = [f"batch {b}, T {t:g}" + (", top-k" if r == "top-k" else "") for b, t, r in columns]
    off = [f"{name} {m['off_tokens_per_second']:.0f}" for name, m in zip(names, measured, strict=True)]
    lines = [
        "# Drafters, shapes and rankings",
        f"`{report['command']}`",
        ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value),
        "Accept length / speed over off. All strategies take turns within one running batch; ranking is coupled unless the "
        f"column says top-k. Off in tokens/s: {', '.join(off)}.",
        "| strategy | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1),
    ]
    for arm in measured[0]["arms"]:
        cells = [f"{m['arms'][arm]['accept_length']:.2f} / {m['arms'][arm]['speed_over_off']:.2f}" for m in measured]
        lines[-1] += f"\n| {arm} | " + " | ".join(cells) + " |"
    out.with_suffix(".md").write_text("\n\n".join(lines) + "\n")
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
