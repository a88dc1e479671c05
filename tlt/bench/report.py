"""Writes reports of benchmarks, and what they have in common: machine, commit, configuration, tables. Measures nothing."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tlt import __version__
from tlt.config.mistakes import validate
from tlt.config.schema import Config
from tlt.files import dumps, with_folder, write_atomically

Changes = Mapping[str, Mapping[str, Any]]
"""Values of a configuration by section and key."""


def with_changes(config: Config, changes: Changes) -> Config:
    """Returns the configuration with these values, validated again. Raises UserError where they contradict the others."""
    values = config.model_dump()
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    changed = ", ".join(f"{section}.{key}" for section, keys in changes.items() for key in keys)
    return validate(Config, values, f"bench: with {changed} changed")


def side_by_side(config: Config) -> Changes:
    """Returns the changes by which several engines live in one process alike: each vLLM has a worker process of its own, where
    else the first alone would be without."""
    return {"vllm": {"own_process": True}} if config.rollout.engine == "vllm" else {}


def header(config: Config, command: str) -> dict[str, Any]:
    """Returns what it takes to repeat a measurement, without host names; of a path it holds the last part only."""
    described = config.model_dump(mode="json")
    for section, key in (("run", "out_dir"), ("model", "path"), ("model", "adapter"), ("drafter", "path")):
        if described[section][key] is not None:
            described[section][key] = Path(described[section][key]).name
    return {"command": command, "environment": environment(), "config": described}


def environment() -> dict[str, Any]:
    """Returns machine, commit and versions, without host names or paths."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = bool(
            subprocess.run(["git", "status", "--porcelain", "tlt"], capture_output=True, text=True, check=False).stdout.strip()
        )
    except (OSError, subprocess.CalledProcessError):
        commit, dirty = "unknown", False
    cpu = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        cpu = f"{names[0]}, {len(names)} cores" if names else cpu
    return {
        "tlt": __version__,
        "commit": commit + ("+changes" if dirty else ""),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_report(out: Path, report: Mapping[str, Any], markdown: str) -> None:
    """Writes OUT.json and OUT.md, each whole or not at all."""
    for ending, text in (("json", dumps(report) + "\n"), ("md", markdown)):
        with write_atomically(with_folder(out.with_name(f"{out.name}.{ending}"))) as file:
            file.write(text)


# ── markdown ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def provenance(report: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a report that name the command, the machine, and what has grown (geometry.py)."""
    machine = ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value)
    return [f"`{report['command']}`", machine, *report.get("geometry", {}).get("lines", [])]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """Returns a Ratio, given as JSON, for people: its mean and, where there is one, its interval."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} – {ratio['high']:.2f})"
    return f"{ratio['mean']:.2f}{interval}"


def number(value: float | None, form: str = ".2f") -> str:
    """Returns the number for people, a dash for None."""
    return "–" if value is None else format(value, form)


def speed(tokens_per_second: float) -> str:
    """Returns tokens per second for people: of a slow engine the tenths count."""
    return f"{tokens_per_second:,.{1 if tokens_per_second < 100 else 0}f}"


def open_report(report: Mapping[str, Any]) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
    """Returns the first blocks of a rollout's report, and its measurements by kind."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for measurement in report["measurements"]:
        by_kind.setdefault(measurement["kind"], []).append(measurement)
    ratios = "Ratios above 1 are faster than off: geometric mean of paired rounds (95 % confidence interval)."
    return ["# Rollout benchmark", *provenance(report), ratios], by_kind


def over_off(measured: Mapping[str, Any]) -> str:
    """Returns on one line how fast every variant was over off."""
    words = ", ".join(f"{name} {ratio_text(ratio)} times off" for name, ratio in measured["ratios"].items())
    return f"{measured['name']}: off {speed(measured['tokens_per_second']['off'])} tokens/s; {words}"
