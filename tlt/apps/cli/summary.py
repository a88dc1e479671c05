"""What a command prints: lines on the way, and its end.

record ─┬─ stdout is a terminal ─▶ headline, then rows of names and rounded values
        └─ a pipe, a file, --json ─▶ one line of JSON, the last one on stdout
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlt.base.io.files import Record, dumps
from tlt.base.io.text import visible, visible_json

if TYPE_CHECKING:
    from rich.console import RenderableType

JSON_HELP = "Prints the result as JSON on stdout, and all else on stderr."
NO_VALUE = "–"


def log(line: str) -> None:
    print(f"tlt: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ended:
    record: Record
    exit_code: int


@dataclass(frozen=True)
class Summary:
    """headline: the one thing to know.
    rows: values by names that say their units. A mapping is indented, a list of mappings is a table.
    """

    headline: str
    rows: Record


Summarize = Callable[[Record], Summary]


@contextlib.contextmanager
def json_alone(is_wanted: bool) -> Iterator[None]:
    """Sends the block's output, also of child processes, to stderr."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show(record: Record, summarize: Summarize, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        print(visible_json(dumps(record)), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    summary = summarize(record)
    console = Console(highlight=False, emoji=False, markup=False)
    console.print()
    console.print(Text(visible(summary.headline), "bold"))
    if summary.rows:
        console.print(to_grid(summary.rows))


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────


def to_grid(rows: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    tables = {name: value for name, value in rows.items() if _is_table(value)}
    for label, value in _lines({name: value for name, value in rows.items() if name not in tables}):
        grid.add_row(Text(visible(label)), Text(visible(value)))
    shown: list[RenderableType] = [grid] if grid.rows else []
    for name, items in tables.items():
        shown += [Text(f"\n{visible(label_of(name))}", "dim"), _to_table(items)]
    return Group(*shown)


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _to_table(items: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, value in items[0].items():
        is_text = isinstance(value, str)
        table.add_column(visible(label_of(name)), justify="left" if is_text else "right", overflow="fold")
    for item in items:
        table.add_row(*(visible(written(name, value)) for name, value in item.items()))
    return table


def _lines(rows: Mapping[str, Any], unit: str = "", indent: str = "") -> Iterator[tuple[str, str]]:
    for name, value in rows.items():
        if isinstance(value, Mapping):
            yield f"{indent}{label_of(name)}", "" if value else "none"
            yield from _lines(value, name, f"{indent}  ")
        else:
            has_unit = _unit_of(name) is not None and isinstance(value, int | float)
            label = label_of(name) if has_unit or not unit else name
            yield f"{indent}{label}", written(name if has_unit else unit or name, value)


def label_of(name: str) -> str:
    """peak_gib → peak, num_ranks → ranks."""
    short = next((name.removesuffix(end) for end in _UNITS if name.endswith(end) and end[0] == "_"), name)
    return short.removeprefix("num_").replace("_", " ")


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(name: str, value: Any) -> str:
    """Writes three significant digits, with the unit that the name says."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return "  ".join(written(name, item) for item in value) or "none"
    if not isinstance(value, int | float):
        return str(value)
    unit = _unit_of(name)
    return rounded(value) if unit is None else unit(value)


def rounded(value: float) -> str:
    """1,234 · 12.3 · 0.0123"""
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{max(2 - math.floor(math.log10(abs(value))), 0)}f}"


def percent(share: float) -> str:
    return f"{100 * share:.3g}%" if abs(share) < 9.995 else f"{100 * share:,.0f}%"


def seconds(value: float) -> str:
    """0.0123 s · 41.2 s · 9 min 21 s"""
    from tlt.training.report.words import duration

    return f"{rounded(value)} s" if abs(value) < 60 else duration(value)


def size(num_bytes: float) -> str:
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{rounded(num_bytes / limit)} {unit}"
    return f"{num_bytes:,.0f} bytes"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "tokens_per_second": lambda value: f"{rounded(float(value))} tokens/s",
    "_seconds": seconds,
    "seconds": seconds,
    "elapsed": seconds,
    "_share": percent,
    "_rate": percent,
    "_bytes": size,
    "_gib": lambda value: f"{rounded(value)} GiB",
    "_times": lambda value: f"{rounded(value)}×",
}
"""Formats by the end of a name. Labels drop an end with an underscore."""


def _unit_of(name: str) -> Callable[[float], str] | None:
    return next((form for end, form in _UNITS.items() if name.endswith(end)), None)
