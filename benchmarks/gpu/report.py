"""The report of all parts as Markdown, written anew after each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.harness import Outcome
from benchmarks.report import ratio_text, table

REHEARSED = "**A rehearsal on a CPU, in small: no figure here says anything of a GPU.**"


def to_markdown(report: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Returns the report: machine, what became of each part, then their figures."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    environment = by_name["environment"].record if "environment" in by_name else None
    blocks = ["# On a GPU", f"`{report['command']}`"]
    blocks += [REHEARSED] if report["rehearsed"] else []
    blocks += ["## Machine", *_machine(environment or {})]
    rows = [[o.name, o.status, f"{o.seconds:.1f}", f"{o.limit:.0f}", _said(o)] for o in outcomes]
    blocks += ["## Parts", table(["part", "status", "seconds", "limit", ""], rows)]
    for outcome in outcomes:
        if outcome.record and outcome.name != "environment" and outcome.status != "skipped":
            blocks += [f"## {outcome.name}", *_figures(outcome.record)]
    for outcome in outcomes:
        if outcome.status in ("failed", "timed out"):
            blocks += [
                f"## Output of {outcome.name}, {outcome.status}",
                f"```\n{outcome.output[-2500:]}\n```",
            ]
    return "\n\n".join(blocks) + "\n"


def _said(outcome: Outcome) -> str:
    """Returns in a few words what a part says of itself."""
    if outcome.status == "skipped" and outcome.record is not None:
        return str(outcome.record["skipped"])
    lines = outcome.output.strip().splitlines()
    return f"`{lines[-1][:120]}`".replace("|", "/") if outcome.status == "failed" and lines else ""


def _machine(record: Mapping[str, Any]) -> list[str]:
    described, versions = record.get("environment", {}), record.get("versions", {})
    words = [f"{key} {value}" for key, value in described.items() if value]
    words += [f"{name} {version or 'missing'}" for name, version in versions.items()]
    gpus = [f"{g['name']}, {g['gib']} GiB, sm {g['capability']}" for g in record.get("gpus", [])]
    lines = [", ".join(words), *gpus]
    lines += [f"nvidia-smi: {record['driver']}"] if record.get("driver") else []
    lines += [f"memory copies at {record['copy_gbps']:,.0f} GB/s"] if "copy_gbps" in record else []
    return [line for line in lines if line] or ["unknown"]


def _figures(record: Mapping[str, Any]) -> list[str]:
    """Returns what a part has measured: a table of each list, a line of everything else."""
    tables = {
        key: value
        for key, value in record.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping)
    }
    said = [". ".join(record["lines"]) + "."] if record.get("lines") else []
    others = {key: value for key, value in record.items() if key not in {"lines", *tables}}
    said += [f"{_words(key)}: {_cell(value)}" for key, value in others.items()]
    for rows in tables.values():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        said.append(
            table([*map(_words, columns)], [[_cell(row.get(key)) for key in columns] for row in rows])
        )
    return said


def _words(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: Any) -> str:
    """Returns a figure, a Ratio, or several with their names, for people."""
    if isinstance(value, Mapping):
        if {"mean", "low", "high"} <= value.keys():
            return ratio_text(value)
        apart = "; " if any(isinstance(one, Mapping) for one in value.values()) else ", "
        return apart.join(f"{_words(key)} {_cell(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)
