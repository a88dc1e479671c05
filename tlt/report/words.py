"""Moments, paths and durations in the words of screens and messages."""

from __future__ import annotations

from pathlib import Path


def when(step: int) -> str:
    """Returns the moment after `step` updates, in words."""
    return f"after {step} updates" if step else "before training"


def near(path: Path) -> str:
    """Returns the path relative to the working directory if it lies there, else the absolute path."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def duration(seconds: float) -> str:
    """Formats a duration: 41 s · 9 min 21 s · 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
