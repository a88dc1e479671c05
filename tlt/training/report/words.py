"""Moments, paths and durations in words."""

from __future__ import annotations

from pathlib import Path

from rich.cells import cell_len, set_cell_size

from tlt.base.io.text import visible


def when(step: int) -> str:
    return f"after {step} updates" if step else "before training"


def near(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def duration(seconds: float) -> str:
    """41 s · 9 min 21 s · 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def cut(text: str, width: int) -> str:
    """A longer text keeps its beginning and end. width: in cells."""
    line = visible(" ".join(text.split()))
    if cell_len(line) <= width:
        return line
    end = 2 * max(width - 3, 0) // 3  # where a chat's question and a response's answer stand
    return f"{set_cell_size(line, max(width - 3 - end, 0))} … {_last_cells(line, end)}"


def _last_cells(line: str, width: int) -> str:
    return set_cell_size(line[::-1], width)[::-1]
