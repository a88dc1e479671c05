"""Writes a measurement's report, OUT.json and OUT.md: command, commit, machine, configuration and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.base.config.mistakes import validate
from tlt.base.config.schema import Config
from tlt.base.io.files import dumps, with_folder, write_atomically
from tlt.training.report.environment import environment as environment

Changes = Mapping[str, Mapping[str, Any]]
"""Values of a configuration by section and key."""


def with_changes(config: Config, changes: Changes) -> Config:
    """Returns the configuration with these values. Raises UserError where they contradict the others."""
    values = config.model_dump()
    for section, keys in changes.items():
        values[section] |= keys
    changed = ", ".join(f"{section}.{key}" for section, keys in changes.items() for key in keys)
    return validate(Config, values, f"bench: with {changed} changed")


def side_by_side(config: Config) -> Config:
    """Returns the configuration for one of several engines in a process: nothing else is measured meanwhile."""
    return with_changes(config, {"rollout": {"measure_speedup_every": 0}})


def header(config: Config, command: str) -> dict[str, Any]:
    """Returns the report's entries that repeat a measurement: command, environment and configuration. Paths
    are cut to their last part."""
    described = config.model_dump(mode="json")
    for section, key in (("run", "out_dir"), ("model", "path"), ("model", "adapter"), ("drafter", "path")):
        if described[section][key] is not None:
            described[section][key] = Path(described[section][key]).name
    return {"command": command, "environment": environment(), "config": described}


def write_report(out: Path, report: Mapping[str, Any], markdown: str) -> None:
    """Writes OUT.json and OUT.md, each whole or not at all."""
    for ending, text in (("json", dumps(report) + "\n"), ("md", markdown)):
        with write_atomically(with_folder(out.with_name(f"{out.name}.{ending}"))) as file:
            file.write(text)


def markdown(title: str, report: Mapping[str, Any], *blocks: str) -> str:
    """Returns the page: title, command, machine, then the blocks."""
    return "\n\n".join([f"# {title}", *provenance(report), *blocks]) + "\n"


def provenance(report: Mapping[str, Any]) -> list[str]:
    """Returns the lines with the command, the machine and the grown geometry (geometry.py)."""
    machine = ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value)
    return [f"`{report['command']}`", machine, *report.get("geometry", {}).get("lines", [])]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """Returns a Ratio (as JSON) as text: its mean and, where there is one, its interval."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} – {ratio['high']:.2f})"
    return f"{ratio['mean']:.2f}{interval}"


def number(value: float | None, form: str = ".2f") -> str:
    """Returns the number as text, a dash for None."""
    return "–" if value is None else format(value, form)


def speed_text(tokens_per_second: float) -> str:
    """Returns tokens per second as text, with tenths below 100."""
    return f"{tokens_per_second:,.{1 if tokens_per_second < 100 else 0}f}"
