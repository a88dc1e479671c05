"""Draws the pictures of README.md and the site.

    python -m tools.docs_pictures steps                       docs/pictures/steps.svg, of benchmarks/results
    python -m tools.docs_pictures terminal FILE NAME TITLE    docs/pictures/NAME.svg, of a log of `script`

Colours are readable on white and on black; nothing is loaded from elsewhere.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"

PAIRS = (
    ("train-headline", "tlt", "32 responses a step, long-tailed"),
    ("ahead-tail", "adaptive", "8 responses a step, rollout.ahead = adaptive: it waits for the longest"),
)
"""Reports of whole steps: the file, the run beside off, and what the steps are."""
PHASES = {
    "generate": ("#4c8df5", ("prefill", "decode", "speculate", "ahead")),
    "idle": ("#9aa0a6", ("wait",)),
    "train the drafter": ("#e8710a", ("train drafter", "preempt", "check drafter")),
    "update the policy": ("#34a853", ("update",)),
}
"""Colour and spans of each part of a step; what no part names is left over."""

WIDTH, LEFT, BAR = 720, 96, 22
INK = "#80868f"


def steps(reports: Sequence[tuple[Mapping[str, Any], str, str]]) -> str:
    """Returns the picture of a step's seconds without TLT and with it, as SVG. reports: as PAIRS, read."""
    longest = max(report["runs"]["off"]["step_seconds"] for report, _, _ in reports)
    scale = (WIDTH - LEFT - 64) / longest
    parts = [*_legend()]
    top = 62
    for report, run, title in reports:
        parts.append(_text(0, top, title))
        for name, label in (("off", "without TLT"), (run, "with TLT")):
            top += BAR + 8
            found = report["runs"][name]
            parts += [_text(LEFT - 8, top - 6, label, "end"), *_bar(found["phase_seconds"], top - BAR, scale)]
            end = LEFT + sum(found["phase_seconds"].values()) * scale
            parts.append(_text(end + 6, top - 6, f"{found['step_seconds']:.1f} s"))
        top += 34
    style = f'font-family="system-ui, sans-serif" font-size="13" viewBox="0 0 {WIDTH} {top - 20}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _legend() -> Iterator[str]:
    yield _text(0, 14, "Mean seconds of a step, two CPU cores, the same tokens and weights")
    left = 0
    for name, (colour, _) in PHASES.items():
        yield f'<rect x="{left}" y="25" width="11" height="11" fill="{colour}"/>'
        yield _text(left + 16, 35, name)
        left += 46 + 7 * len(name)


def _bar(seconds: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    """Yields the parts of a bar; the rest of the step is its last, unnamed part."""
    widths = [(colour, sum(seconds.get(span, 0.0) for span in spans)) for colour, spans in PHASES.values()]
    widths.append((INK, sum(seconds.values()) - sum(width for _, width in widths)))
    left = float(LEFT)
    for colour, width in widths:
        yield f'<rect x="{left:.1f}" y="{top}" width="{width * scale:.1f}" height="{BAR}" fill="{colour}"/>'
        left += width * scale


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def terminal(shown: str, title: str, width: int = 96) -> str:
    """Returns what a terminal of that width shows, as SVG. shown: text with its colours' escapes."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(shown), crop=False)
    drawn = console.export_svg(title=title, unique_id="t")
    without_fonts = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", drawn, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in without_fonts.splitlines() if line.strip()) + "\n"


def screen(log: str) -> str:
    """Returns what is left on a terminal's screen and above it, with colours. log: what `script` has kept of
    a program that goes back to a line only to write it anew."""
    lines, row, is_back = [""], 0, False
    for part in re.split(r"(\r*\n|\r|\x1b\[\d*[AK]|\x1b\[\?\d+[lh])", log):
        if part.endswith("\n"):
            row, is_back = row + 1, False
            lines += [""] if row == len(lines) else []
        elif part == "\r":
            is_back = True
        elif re.fullmatch(r"\x1b\[\d*K", part):
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif part and not part.startswith("\x1b[?"):
            lines[row], is_back = part if is_back else lines[row] + part, False
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    if arguments[0] == "steps":
        results = ROOT / "benchmarks" / "results"
        reports = [
            (json.loads((results / f"{file}.json").read_text()), run, title) for file, run, title in PAIRS
        ]
        (PICTURES / "steps.svg").write_text(steps(reports))
    else:
        _, file, name, title = arguments
        (PICTURES / f"{name}.svg").write_text(terminal(screen(Path(file).read_bytes().decode()), title))


if __name__ == "__main__":
    main(sys.argv[1:])
