"""`tlt doctor`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tlt.apps.cli.engine import show_busy
from tlt.apps.cli.options import Options
from tlt.apps.cli.summary import Ended, Summary
from tlt.base.io.extras import PURPOSES
from tlt.base.io.files import Record
from tlt.base.io.machine import Facts, Finding, diagnose, read_facts


class Doctor(Options):
    """Look at this machine: what is missing, and how to get it.

    Exit code 0: TLT works here; 1: something that it needs is broken. Optional packages may be missing.
    """


def run(options: Doctor) -> Ended:
    with show_busy("looking at this machine"):
        facts = read_facts(*_limits())
    return report(facts, diagnose(facts))


def _limits() -> tuple[int, int]:
    try:
        from tlt.engine.memory import machine_bytes
        from tlt.training.build.ranks import num_cores
    except (ImportError, OSError):  # torch cannot be imported, which the facts say
        return os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return num_cores(), machine_bytes()


def report(facts: Facts, found: Sequence[Finding]) -> Ended:
    machine = {
        "python": facts.python,
        "cpu_cores": facts.cpu_cores,
        "memory_gib": facts.memory_bytes / 2**30,
        "gpus": [{"name": gpu.name, "memory_gib": gpu.memory_bytes / 2**30} for gpu in facts.gpus],
        "compilers": dict(facts.compilers),
    }
    broken = [one.name for one in found if one.state == "broken"]
    told = {one.name: {"state": one.state, "text": one.text, "remedy": one.remedy} for one in found}
    record = {"works": not broken, "broken": broken, "machine": machine, "found": told}
    return Ended(record, int(bool(broken)))


def summarize(record: Record) -> Summary:
    machine, by_state = record["machine"], dict[str, dict[str, str]]()
    for name, one in record["found"].items():
        by_state.setdefault(one["state"], {})[name] = f"{one['text']}\n{one['remedy']}".strip()
    missing, fine = by_state.get("missing", {}), by_state.get("ok", {})
    headline = "TLT works here" if record["works"] else f"broken: {', '.join(record['broken'])}"
    headline += f"; optional and missing: {', '.join(missing)}" if missing else ""
    rows: Record = {"broken": by_state["broken"]} if "broken" in by_state else {}
    rows["Python"] = machine["python"]
    rows["CPU"] = f"{machine['cpu_cores']} cores, {machine['memory_gib']:.1f} GiB"
    shown = ("GPUs", "compilers")
    rows |= {name: fine.pop(name) for name in shown if name in fine}
    rows["packages"] = ", ".join(f"{name} {text}" for name, text in fine.items() if name not in PURPOSES)
    rows["optional"] = ", ".join(name for name in fine if name in PURPOSES) or "none"
    for state, title in (("note", "to note"), ("missing", "missing")):
        rows |= {title: by_state[state]} if state in by_state else {}
    return Summary(headline, rows)
