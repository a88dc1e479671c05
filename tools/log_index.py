"""Writes the index at the head of benchmarks/log.md: a line for each entry, in the log's order.

python -m tools.log_index
"""

from __future__ import annotations

from pathlib import Path

LOG = Path(__file__).parents[1] / "benchmarks" / "log.md"
HEADING, END = "## Index\n", "\n---\n"


def with_index(text: str) -> str:
    """Returns the log with its index between the head and the first rule."""
    head, _, entries = text.partition(END)
    lines = [f"- {line.removeprefix('## ')}" for line in entries.splitlines() if line.startswith("## ")]
    return head.partition(HEADING)[0].rstrip() + f"\n\n{HEADING}\n" + "\n".join(lines) + f"\n{END}{entries}"


if __name__ == "__main__":
    LOG.write_text(with_index(LOG.read_text(encoding="utf-8")), encoding="utf-8")
