"""The report of all parts as Markdown, written anew after each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.harness import Outcome
from tlt.bench.report import number, ratio_text, speed, table

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
        if outcome.record is not None:
            kind = next((kind for kind in FIGURES if outcome.name.startswith(kind)), None)
            blocks += [] if kind is None else [f"## {outcome.name}", *FIGURES[kind](outcome.record)]
    for outcome in outcomes:
        if outcome.status in ("failed", "timed out"):
            blocks += [f"## Output of {outcome.name}, {outcome.status}", f"```\n{outcome.output[-2500:]}\n```"]
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


def _law(record: Mapping[str, Any]) -> list[str]:
    draws = record.get("draws", [])
    rows = [[f"{d['vocab_size']:,}", d["draws"], d["other_tokens"], f"{d['logprob_share']:.2f}"] for d in draws]
    blocks = [table(["vocabulary", "draws", "other tokens than the reference's", "of the bound on log-probabilities"], rows)]
    if noise := record.get("noise"):
        values = f"{noise['other_noise']} of {noise['values']:,} noise values have other bits"
        blocks.append(f"{values}, by {noise['most_units']} units at most.")
    names = list(record["times"][0]["ms"]) if record.get("times") else []
    times = [
        [f"{t['vocab_size']:,}", t["rows"], *(f"{t['ms'][n]:.3f}" for n in names), f"{t['ms']['law'] / t['rows']:.4f}"]
        for t in record.get("times", [])
    ]
    return [*blocks, table(["vocabulary", "rows", *(f"{n}, ms" for n in names), "law, ms a row"], times)] if times else blocks


def _equality(record: Mapping[str, Any]) -> list[str]:
    keys = ["dtype", "variant", "responses", "equal", "tokens", "near_ties", "first_difference"]
    rows = [
        [*(number(o[k], "d") if isinstance(o[k], int | None) else o[k] for k in keys), f"{o['logprob_gap']:.1e}"]
        for o in record.get("compared", [])
    ]
    return [table([*(k.replace("_", " ") for k in keys), "gap of log-probabilities"], rows)]


def _steps(record: Mapping[str, Any]) -> list[str]:
    names = ["launches", "kernels", "copies to the host", "copies to the GPU", "waits"]
    rows, places = [], []
    for s in record.get("steps", []):
        shown = [number(1e3 * s["step_seconds"] if "step_seconds" in s else None), number(s.get("host_share"), ".0%")]
        by_line = s["waits_by_line"]
        rows.append(
            [s["strategy"], s["batch"], *shown, *(number(s.get(n), ".1f") for n in names), f"{sum(by_line.values()):.1f}"]
        )
        where = ", ".join(f"{place} {num:.1f}" for place, num in by_line.items())
        places.append(f"{s['strategy']} at batch {s['batch']} waits in: {where or 'no line'}")
    columns = ["strategy", "batch", "ms a step", "host's share", *names, "waits by line"]
    return [*_lines(record), table(columns, rows), *places]


def _throughput(record: Mapping[str, Any]) -> list[str]:
    measured = record.get("constant", [])
    names = list(measured[0]["ratios"]) if measured else []
    rows = [
        [m["batch_size"], speed(m["tokens_per_second"]["off"])]
        + [f"{ratio_text(m['ratios'][n])}; accepts {number(m['accept_length'][n])}" for n in names]
        for m in measured
    ]
    memory = [f"At most {record['peak_gib']:.1f} GiB were allocated."] if "peak_gib" in record else []
    return [*_lines(record), table(["batch", "off, tokens/s", *(f"{n}, times off" for n in names)], rows), *memory]


def _training(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for s in record.get("steps", []):
        memory = s["memory"] or {}
        sizes = [number(memory.get(name)) for name in ("allocated", "reserved", "taken")]
        rows.append([s["step"] + 1, f"{s['seconds']:.2f}", s["tokens"], s["longest"], number(s["accept_length"]), *sizes])
    columns = ["step", "seconds", "tokens", "longest", "accepts", "GiB allocated", "reserved", "taken"]
    blocks = [*_lines(record), table(columns, rows)]
    if planned := record.get("planned"):
        phases = ", ".join(f"{phase} {gib:.1f}" for phase, gib in planned["by_phase"].items())
        blocks.append(f"Planned: at most {planned['peak_gib']:.1f} GiB, in the phase {planned['phase']} ({phases}).")
    if seconds := record.get("phase_seconds"):
        blocks.append("Seconds a step: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))
    return blocks


def _vllm(record: Mapping[str, Any]) -> list[str]:
    rows = [[m["batch"], speed(m["tokens_per_second"])] for m in record.get("vllm", [])]
    return [table(["batch", "tokens/s"], rows)] if rows else []


def _lines(record: Mapping[str, Any]) -> list[str]:
    grown = f" Grown in {record['growing_seconds']:.1f} s." if "growing_seconds" in record else ""
    return [". ".join(record["lines"]) + "." + grown] if record.get("lines") else []


FIGURES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "law": _law,
    "equality": _equality,
    "steps": _steps,
    "step, ": _training,
    "throughput": _throughput,
    "vllm": _vllm,
}
"""By the first words of a part's name."""
