"""Draws the pictures of README.md and the site.

    python -m tools.docs_pictures running                     docs/pictures/running.svg, of benchmarks/results
    python -m tools.docs_pictures terminal FILE NAME TITLE    docs/pictures/NAME.svg, of a log of `script`

Colours are readable on white and on black, and for the colour-blind; nothing is loaded from elsewhere.
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
RUNNING = ROOT / "benchmarks" / "results" / "running.json"

LABELS = {"off": ("without TLT", "#8b949e"), "tlt": ("with TLT", "#2b8cdb")}
"""Title and colour of each run."""
TRAINS = "#e69f00"
WIDTH, LEFT, RIGHT, HEIGHT, STRIP = 760, 64, 72, 104, 11
INK = "#757a83"


def running(report: Mapping[str, Any]) -> str:
    """Returns the picture of the responses that run over the seconds of one rollout, as SVG. report: of
    benchmarks/running.py."""
    rollouts = report["rollouts"]
    longest = max(found["seconds"] for found in rollouts.values())
    across, up = (WIDTH - LEFT - RIGHT) / longest, HEIGHT / report["num_responses"]
    title = f"{report['num_responses']} responses of one step, the same tokens in both: how many still run"
    parts = [*_hatch(), _text(0, 15, title, weight="bold"), *_legend()]
    top = 62.0
    for name, found in rollouts.items():
        label, colour = LABELS[name]
        bottom = top + HEIGHT
        for count in (0, report["num_responses"] // 2, report["num_responses"]):
            y = bottom - count * up
            parts.append(_line(LEFT, y, LEFT + longest * across, y, 0.35))
            parts.append(_text(LEFT - 8, y + 4, str(count), "end"))
        path = _steps(found["running"], across, up, bottom)
        parts.append(f'<path d="{path}" fill="{colour}" fill-opacity="0.75" stroke="{colour}"/>')
        end = LEFT + found["seconds"] * across
        parts += [
            _line(end, top + 30, end, bottom + 6 + 2 * STRIP),
            _text(end - 6, top + 20, label, "end", "bold"),
        ]
        parts.append(_text(end + 6, bottom - 6, f"{found['seconds']:.1f} s", weight="bold"))
        for rank, stretches in enumerate(found["ranks"]):
            y = bottom + 6 + rank * (STRIP + 3)
            parts += [_text(LEFT - 8, y + 10, f"rank {rank}", "end"), *_strip(stretches, y, across, colour)]
        top = bottom + 64
    parts += _seconds(longest, across, top - 20)
    style = f'font-family="system-ui, sans-serif" font-size="13" viewBox="0 0 {WIDTH} {top + 4:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _steps(curve: Sequence[tuple[float, int]], across: float, up: float, bottom: float) -> str:
    """Returns a curve that keeps each height until the next time."""
    moves = "".join(f"H{LEFT + at * across:.1f}V{bottom - num * up:.1f}" for at, num in curve)
    return f"M{LEFT} {bottom:.1f}{moves}Z"


def _strip(
    stretches: Sequence[tuple[str, float, float]], y: float, across: float, colour: str
) -> Iterator[str]:
    """Yields what a rank does over time: it generates, trains the drafter, or waits (nothing is drawn)."""
    for use, start, end in stretches:
        if use != "waits":
            yield _box(
                LEFT + start * across, y, (end - start) * across, colour if use == "generates" else TRAINS
            )
            if use == "trains":
                yield _box(LEFT + start * across, y, (end - start) * across, "url(#hatch)")


def _seconds(longest: float, across: float, y: float) -> Iterator[str]:
    for second in range(0, int(longest) + 1, 2):
        yield _text(LEFT + second * across, y, str(second), "middle")
    yield _text(WIDTH - RIGHT + 6, y, "seconds")


def _hatch() -> Iterator[str]:
    size = 'width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    yield f'<pattern id="hatch" {size}>'
    yield '<rect width="1.6" height="5" fill="#5c3d00"/></pattern>'


def _legend() -> Iterator[str]:
    yield _text(0, 40, "Below, each rank:")
    yield from (_box(130, 30, 9, LABELS["off"][1]), _box(139, 30, 9, LABELS["tlt"][1]))
    yield from (_box(250, 30, 18, TRAINS), _box(250, 30, 18, "url(#hatch)"))
    for x, text in ((154, "generates"), (274, "trains the drafter in idle time"), (500, "empty: waits")):
        yield _text(x, 40, text)


def _box(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{STRIP}" fill="{fill}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, opacity: float = 1.0) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{INK}" stroke-opacity="{opacity}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    look = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{text}</text>'


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
    if arguments[0] == "running":
        (PICTURES / "running.svg").write_text(running(json.loads(RUNNING.read_text())))
    else:
        _, file, name, title = arguments
        (PICTURES / f"{name}.svg").write_text(terminal(screen(Path(file).read_bytes().decode()), title))


if __name__ == "__main__":
    main(sys.argv[1:])
