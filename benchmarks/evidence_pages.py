"""evidence.json, and the tables of README.md and docs/results.md that are made from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import FIGURES, TABLES, Table
from benchmarks.tables import speed_text, table
from tlt.base.types import UserError

ROOT = Path(__file__).parents[1]
EVIDENCE = Path("benchmarks/results/evidence.json")
EARLIER = ", earlier"


@dataclass(frozen=True)
class Evidence:
    """A measured figure: an entry of evidence.json.

    value, low, high: mean and 95 % interval of a speedup, or a share; base: what it is compared with. None: there is none.
    commit, date: of the tree that was measured.
    machine: processor and versions.
    load: mean running processes of the minute before. steal, others: shares of all processor time during the
        measurement. None: not written down.
    report: raw figures, from the repository's root.
    is_earlier: whether a later commit had changed what it measures when the pages were written.
    """

    value: float
    low: float | None
    high: float | None
    unit: str
    base: float | None
    commit: str
    date: str
    machine: str
    load: float | None
    steal: float | None
    others: float | None
    command: str
    minutes: float | None
    report: str
    is_earlier: bool = False


def read_evidence(root: Path = ROOT) -> dict[str, Evidence]:
    """Returns the figures by name. Those that figures.py does not name any more are left out."""
    path = root / EVIDENCE
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Evidence(**found[name]) for name in FIGURES if name in found}


def cell(names: str, evidence: Mapping[str, Evidence]) -> str:
    """Returns a cell of a row (Table)."""
    return " · ".join(_said(evidence[n], base) for n, base in _named(names) if n in evidence) or "–"


def _named(names: str) -> list[tuple[str, bool]]:
    """Returns a cell's figures, and whether their bases are meant."""
    return [(name.removesuffix(".base"), name.endswith(".base")) for name in names.split()]


def _said(found: Evidence, wants_base: bool) -> str:
    if wants_base:
        return speed_text(found.base or 0.0)
    if found.unit == "solved":
        return f"{found.base:.1%} → {found.value:.1%}".replace("%", " %")
    return f"{found.value:.2f}" + ("" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})")


def source(found: Iterable[Evidence], page: str) -> str:
    """Returns the commits of figures, linked with their reports from this page."""
    links = {
        f"[{e.commit}]({os.path.relpath(e.report, Path(page).parent)}){EARLIER * e.is_earlier}" for e in found
    }
    return "; ".join(sorted(links))


def render(one: Table, evidence: Mapping[str, Evidence]) -> str:
    """Returns a table as Markdown. Rows without a measured figure are left out."""
    rows = []
    for row in one.rows:
        words, cells = row[: one.num_words], row[one.num_words :]
        names = [name for text in cells for name, _ in _named(text)]
        if found := [evidence[name] for name in names if name in evidence]:
            rows.append([*words, *(cell(text, evidence) for text in cells), source(found, one.page)])
    return table([*one.columns, "measured at"], rows)


def with_tables(page: str, text: str, evidence: Mapping[str, Evidence]) -> str:
    """Returns a page with its tables. Raises UserError for a table without its markers."""
    for name, one in TABLES.items():
        if one.page == page:
            marks = f"<!-- evidence: {name} -->", "<!-- end -->"
            before, found, rest = text.partition(marks[0])
            _, end, after = rest.partition(marks[1])
            if not (found and end):
                raise UserError(f"{page}: has no lines {marks[0]} and {marks[1]}")
            text = f"{before}{found}\n{render(one, evidence)}\n{end}{after}"
    return text


def pages(evidence: Mapping[str, Evidence], root: Path = ROOT) -> dict[str, str]:
    """Returns the pages by name, with their tables."""
    names = sorted({one.page for one in TABLES.values()})
    return {name: with_tables(name, (root / name).read_text(encoding="utf-8"), evidence) for name in names}
