"""Writes a measurement's report, OUT.json and OUT.md: command, commit, machine, configuration and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import number as number
from benchmarks.tables import ratio_text as ratio_text
from benchmarks.tables import speed_text as speed_text
from benchmarks.tables import table as table
from tlt.base.config.mistakes import validate
from tlt.base.config.schema import Config
from tlt.base.io.files import dumps, with_folder, write_atomically
from tlt.training.report.versions import environment as environment

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
