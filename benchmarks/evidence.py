"""Measures the figures that README.md and docs/results.md cite, and writes them into these pages.

    python -m benchmarks.evidence --list              the measurements: minutes, figures, of this tree or of an earlier one
    python -m benchmarks.evidence [--only NAME …]     measures what is of an earlier tree or not measured, one at a time
    python -m benchmarks.evidence --enter NAME REPORT takes a report that the measurement's command has written elsewhere
    python -m benchmarks.evidence --write             the pages anew: which figures are of an earlier tree, by git
    python -m benchmarks.evidence --check             exit code 1 where the pages are not what --write would write

    figures.py ─ command ─▶ report ─▶ benchmarks/results/evidence.json ─▶ tables of README.md, docs/results.md

A measurement waits for a quiet machine. Its load before, and during it the shares of processor time that the hypervisor
(steal) and other processes took, stand beside each figure. Stop and repeat the command as you like: finished figures stay.
VLLM_PYTHON names an interpreter with vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, make_parser
from benchmarks.evidence_pages import EVIDENCE, ROOT, Evidence, cell, pages, read_evidence
from benchmarks.figures import MEASUREMENTS, Figure, Measurement
from tlt.base.io.files import dumps, write_atomically
from tlt.base.types import UserError

RESULTS = EVIDENCE.parent
SCRATCH = Path("runs/evidence")
PYPI = {"smollm2": "smollm2", "qwen": "qwen2.5-0.5b"}
"""Recipes whose models `tlt init --from-pypi` makes, by their placeholder in a command."""
MADE = {"gsm8k": SCRATCH / "gsm8k", "drafter": SCRATCH / "models" / PYPI["qwen"] / "drafter"}
"""Folders that are made as recipes/qwen2.5-0.5b/README.md says, by their placeholder."""
QUIET = 0.15
"""The largest share of processor time in use, over five seconds, of a machine that counts as quiet."""


def look_up(report: Any, at: str) -> Any:
    """Returns the value at a place of a report (Figure.at). Raises KeyError, IndexError or StopIteration."""
    for part in at.split("."):
        if isinstance(report, list) and "=" in part:
            key, _, value = part.partition("=")
            report = next(entry for entry in report if str(entry[key]) == value)
        else:
            report = report[int(part)] if isinstance(report, list) else report[part]
    return report


def read_figures(one: Measurement, report: Any, about: Mapping[str, Any]) -> dict[str, Evidence]:
    """Returns a measurement's figures. about: the fields that all of them share."""

    def read(figure: Figure) -> Evidence:
        try:
            found = look_up(report, figure.at)
            base = look_up(report, figure.base) if figure.base else None
        except (KeyError, IndexError, StopIteration):
            raise UserError(f"its report has nothing at {figure.at} or {figure.base}") from None
        ratio = found if isinstance(found, dict) else {"mean": found, "low": None, "high": None}
        return Evidence(ratio["mean"], ratio["low"], ratio["high"], figure.unit, base, **about)

    return {name: read(figure) for name, figure in one.figures.items()}


# ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


NOT_MEASURED = ("tlt/engine/vllm/", "tlt/training/live.py")
"""No figure is of vLLM as TLT's engine (beside vLLM stands vLLM as it comes), or of rollouts in another trainer's loop."""


def has_changed(commit: str, paths: Sequence[str]) -> bool:
    """Returns whether the paths compute something else than at this commit. An unknown commit: yes."""
    try:
        names = git("diff", "--name-only", "--no-renames", commit, "HEAD", "--", *paths).splitlines()
    except UserError:
        return True
    return any(
        code(commit, name) != code("HEAD", name) for name in names if not name.startswith(NOT_MEASURED)
    )


@cache
def code(commit: str, name: str) -> str | None:
    """Returns a file at a commit, of a library's or benchmark's module what it computes: no comments, no docstrings (of a
    recipe's they may be read: tools of an environment). None: there is no such file."""
    try:
        text = git("show", f"{commit}:{name}")
    except UserError:
        return None
    if not name.endswith(".py") or name.startswith("recipes/"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not is_text(each)]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def marked(evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Returns the figures with is_earlier as git has it."""
    paths = {name: one.changes for one in MEASUREMENTS.values() for name in one.figures}
    return {name: replace(e, is_earlier=has_changed(e.commit, paths[name])) for name, e in evidence.items()}


def is_current(one: Measurement, evidence: Mapping[str, Evidence]) -> bool:
    return all(name in evidence and not evidence[name].is_earlier for name in one.figures)


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────


def processor_seconds() -> tuple[float, float, float]:
    """Returns seconds of all processors since the start: in all, stolen by the hypervisor, used by others than our finished
    processes."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    total, idle, stolen = (
        each / os.sysconf("SC_CLK_TCK") for each in (sum(ticks), ticks[3] + ticks[4], ticks[7])
    )
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total, stolen, total - idle - stolen - ours.ru_utime - ours.ru_stime


def shares_since(start: tuple[float, float, float]) -> dict[str, float]:
    """Returns the shares of the processors' time that were stolen, and that other processes took."""
    total, stolen, others = (
        max(now - then, 0.0) for now, then in zip(processor_seconds(), start, strict=True)
    )
    return {"steal": round(stolen / total, 4), "others": round(others / total, 4)}


def wait_for_quiet(patience_minutes: float) -> None:
    """Waits until the machine is quiet. Raises UserError when patience is over."""
    end = time.monotonic() + 60 * patience_minutes
    while True:
        start = processor_seconds()
        time.sleep(5)
        if (used := sum(shares_since(start).values())) <= QUIET:
            return
        if time.monotonic() > end:
            raise UserError(f"the machine is busy, {used:.0%} of it: end other work, or give --busy")
        print(f"waits: {used:.0%} of the machine is in use", flush=True)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────


def lacking(one: Measurement) -> str | None:
    """Returns what a measurement lacks on this machine; None: nothing."""
    if "{vllm}" in one.command and not vllm_python().exists():
        return "an interpreter with vLLM: VLLM_PYTHON, or make vllm-test"
    for placeholder, folder in MADE.items():
        if f"{{{placeholder}}}" in one.command and not (ROOT / folder).exists():
            return f"the folder {folder} (recipes/{PYPI['qwen']}/README.md)"
    if one.needs is not None and importlib.util.find_spec(one.needs) is None:
        return f"the package {one.needs}"
    return None


def vllm_python() -> Path:
    return Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))


def fill(text: str, out: Path) -> str:
    """Returns a command or a path with its placeholders filled in."""
    models = {name: SCRATCH / "models" / recipe for name, recipe in PYPI.items()}
    for name, value in {"out": out, "vllm": vllm_python(), **models, **MADE}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def run_python(*words: str) -> None:
    """Runs `python -m WORDS` in the repository's root. Raises UserError for another exit code than 0."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environ, check=False)
    if done.returncode:
        raise UserError(f"python -m {' '.join(words)}: exit code {done.returncode}")


def measure(name: str, one: Measurement, patience_minutes: float | None) -> dict[str, Evidence]:
    """Runs a measurement and keeps its report. patience_minutes: to wait for a quiet machine; None: measures at once."""
    if changes := git("status", "--porcelain", "--", "tlt", *one.changes):
        raise UserError(f"{name}: what it measures is changed and not committed: {changes.split()[-1]}")
    for placeholder, recipe in PYPI.items():
        folder = SCRATCH / "models" / recipe
        if f"{{{placeholder}}}" in one.command and not (ROOT / folder).exists():
            run_python("tlt", "init", recipe, str(folder), "--from-pypi")
    out = SCRATCH / name / name
    shutil.rmtree(ROOT / out.parent, ignore_errors=True)
    (ROOT / out.parent).mkdir(parents=True)
    if patience_minutes is not None:
        wait_for_quiet(patience_minutes)
    begun, load, start = time.monotonic(), os.getloadavg()[0], processor_seconds()
    run_python(*fill(one.command, out).split())
    shares, minutes = shares_since(start), (time.monotonic() - begun) / 60
    about = {"load": round(load, 2), **shares, "minutes": round(minutes, 1), "date": date.today().isoformat()}
    return enter(name, one, ROOT / fill(one.report, out), about)


def enter(name: str, one: Measurement, path: Path, about: Mapping[str, Any]) -> dict[str, Evidence]:
    """Returns the figures of a report, which is copied to benchmarks/results. about: what is known beside it."""
    if path.suffix == ".jsonl":  # of a run
        report = read_lines(path)
        command, described = f"python -m {one.command}", read_lines(path.with_name("environment.jsonl"))[0]
        kept = keep(path, RESULTS / name / path.name)
    else:
        report = json.loads(path.read_text(encoding="utf-8"))
        command, described = without_folder(report["command"], path), report["environment"]
        kept = keep(path, RESULTS / f"{name}.json")
        if path.with_suffix(".md").exists():
            kept = keep(path.with_suffix(".md"), RESULTS / f"{name}.md")
    shared = {
        "commit": described["commit"],
        "date": git("log", "-1", "--format=%cs", described["commit"]),
        "machine": f"{described['cpu']}; Python {described['python']}, torch {described['torch']}",
        **dict.fromkeys(("load", "steal", "others", "minutes")),
        "command": command,
        "report": str(kept),
    }
    return read_figures(one, report, {**shared, **about})


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_folder(text: str, path: Path) -> str:
    """Returns a report's text without the folder that it was written to, and without the repository's."""
    folder = path.parent
    near = [f"{folder.relative_to(ROOT)}/"] if folder.is_relative_to(ROOT) else []
    for known in (f"{folder}/", *near, f"{ROOT}/"):
        text = text.replace(known, "")
    return text


def keep(path: Path, kept: Path) -> Path:
    """Copies a report into the repository."""
    (ROOT / kept).parent.mkdir(exist_ok=True)
    (ROOT / kept).write_text(without_folder(path.read_text(encoding="utf-8"), path), encoding="utf-8")
    return kept


# ── evidence.json and the pages ──────────────────────────────────────────────────────────────────────────────


def write(evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Writes evidence.json and the pages, with the marks of git; returns what was written."""
    found = marked(evidence)
    texts = {
        str(EVIDENCE): dumps({name: asdict(e) for name, e in found.items()}, indent=1) + "\n",
        **pages(found),
    }
    for name, text in texts.items():
        with write_atomically(ROOT / name) as file:
            file.write(text)
    return found


def stale(evidence: Mapping[str, Evidence]) -> list[str]:
    """Returns a line for each page or mark that --write would change."""
    now = marked(evidence)
    lines = [
        f"{name}: of an earlier tree"
        for name, e in now.items()
        if e.is_earlier and not evidence[name].is_earlier
    ]
    return lines + [
        f"{name}: not as evidence.json has it"
        for name, text in pages(evidence).items()
        if text != (ROOT / name).read_text(encoding="utf-8")
    ]


def describe(name: str, one: Measurement, evidence: Mapping[str, Evidence]) -> str:
    state = "of this tree" if is_current(one, evidence) else "of an earlier tree, or not measured"
    says = [
        f"    {figure}: {one.figures[figure].says}; {cell(figure, evidence) or 'not measured'}"
        for figure in one.figures
    ]
    return "\n".join([f"{name}: {one.minutes:g} min, {state}", f"    python -m {one.command}", *says])


def main() -> int:
    parser = make_parser("evidence", __doc__, needs_out=False)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=sorted(MEASUREMENTS), help="these measurements"
    )
    parser.add_argument("--again", action="store_true", help="also what is of this tree already")
    parser.add_argument("--busy", action="store_true", help="does not wait for a quiet machine")
    parser.add_argument("--patience", type=float, default=30.0, help="minutes to wait for a quiet machine")
    parser.add_argument("--list", action="store_true", help="prints the measurements, and runs none")
    parser.add_argument("--write", action="store_true", help="writes the pages anew, and runs none")
    parser.add_argument("--check", action="store_true", help="tells what --write would change, and runs none")
    parser.add_argument("--enter", nargs=2, metavar=("NAME", "REPORT"), help="enters a report, and runs none")
    options = parser.parse_args()
    evidence = read_evidence()
    if options.list:
        found = marked(evidence)
        print("\n".join(describe(name, one, found) for name, one in MEASUREMENTS.items()))
        return 0
    if options.check:
        lines = stale(evidence)
        print("\n".join(lines) or "the pages are as evidence.json and git have it")
        return 1 if lines else 0
    if options.enter:
        name, path = options.enter
        if name not in MEASUREMENTS:
            raise UserError(f"--enter: {name!r} is unknown; give one of {', '.join(MEASUREMENTS)}")
        evidence |= enter(name, MEASUREMENTS[name], Path(path), {})
    evidence = write(evidence)
    if options.write or options.enter:
        return 0
    chosen = {name: MEASUREMENTS[name] for name in options.only or MEASUREMENTS}
    chosen = {n: one for n, one in chosen.items() if options.again or not is_current(one, evidence)}
    lacks = {name: what for name, one in chosen.items() if (what := lacking(one))}
    for name, what in lacks.items():
        print(f"left out: {name} needs {what}")
        del chosen[name]
    minutes = sum(one.minutes for one in chosen.values())
    print(f"{len(chosen)} measurements, about {minutes:g} minutes: {', '.join(chosen)}", flush=True)
    failed = False
    for name, one in chosen.items():
        print(f"{name}: about {one.minutes:g} minutes", flush=True)
        try:
            evidence = write(evidence | measure(name, one, None if options.busy else options.patience))
        except UserError as error:  # the others can still be measured
            print(f"{name}: not measured: {error}", flush=True)
            failed = True
        else:
            print(describe(name, one, evidence), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(carry_out("evidence", main))
