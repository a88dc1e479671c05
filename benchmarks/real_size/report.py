"""Measurements → figures and verdicts.

runs      of every competitor, round by round, each beside the base of the same round
speed     base seconds / its seconds: so competitors that never lived at the same time can be compared
verdicts  our engine off beside the fastest peer that is off; adaptive beside the fastest of all others
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.real_size.competitors import BASE, Competitor
from benchmarks.real_size.serving import Took
from benchmarks.report import markdown, number, ratio_text, speed_text, table
from tlt.training.report.ratio import Ratio


@dataclass(frozen=True)
class Runs:
    """A competitor's runs at one batch size and temperature."""

    name: str
    took: Sequence[Took]
    base: Sequence[Took]
    """Those of BASE in the same rounds."""

    @property
    def speeds(self) -> list[float]:
        """Speed relative to the base, round by round."""
        return [base.seconds / took.seconds for base, took in zip(self.base, self.took, strict=True)]


def describe_cell(temperature: float, batch_size: int, runs: Sequence[Runs]) -> dict[str, Any]:
    """Returns the figures of one temperature and batch size."""
    return {
        "temperature": temperature,
        "batch_size": batch_size,
        "competitors": {one.name: _figures(one) for one in runs},
        "verdicts": verdicts(runs),
    }


def _figures(runs: Runs) -> dict[str, Any]:
    took, speeds = runs.took, [one.num_tokens / one.seconds for one in runs.took]
    lengths = [one.accept_length for one in took if one.accept_length is not None]
    return {
        "tokens_per_second": statistics.median(speeds),
        "range": [min(speeds), max(speeds)],
        "over_base": asdict(Ratio.of(runs.speeds)),
        "decoded_per_second": statistics.median(map(_decoded_per_second, took)),
        "first_seconds": statistics.median(one.first_seconds for one in took),
        "cores": statistics.median(one.cpu_seconds / one.seconds for one in took),
        "accept_length": statistics.mean(lengths) if lengths else None,
        "rounds": [asdict(one) for one in took],
        "base_rounds": [asdict(one) for one in runs.base],
    }


def runs_of_cell(report: Mapping[str, Any], temperature: float, batch_size: int) -> list[Runs]:
    """Returns the runs that a report has of a cell."""
    return [
        Runs(name, *([Took(**one) for one in figures[key]] for key in ("rounds", "base_rounds")))
        for cell in report["cells"]
        if (cell["temperature"], cell["batch_size"]) == (temperature, batch_size)
        for name, figures in cell["competitors"].items()
    ]


def _decoded_per_second(took: Took) -> float:
    """Returns tokens per second once each response had its first one."""
    return (took.num_tokens - took.num_responses) / (took.seconds - took.first_seconds)


def verdicts(runs: Sequence[Runs]) -> dict[str, Any]:
    """Returns our off beside the fastest peer's off, our cold beside the fastest peer, and whether all that
    follow the law have the same tokens. Leaves out what was not measured."""
    by_name = {one.name: one for one in runs}
    parsed = {name: Competitor.parse(name) for name in by_name}
    others = [name for name, one in parsed.items() if one.engine in ("vllm", "llama")]
    found: dict[str, Any] = {}
    for name, rivals in ((BASE, [name for name in others if parsed[name].is_off]), ("tlt-cold", others)):
        if name in by_name and rivals:
            fastest = max(rivals, key=lambda rival: Ratio.of(by_name[rival].speeds).mean)
            ratio = Ratio.between(by_name[name].speeds, by_name[fastest].speeds)
            found[name] = {"beside": fastest, "ratio": asdict(ratio)}
    tokens = {
        tuple(took.token_hash for took in one.took) for name, one in by_name.items() if parsed[name].is_ours
    }
    return found | {"same_tokens": len(tokens) == 1}


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    setup, versions = report["setup"], report["versions"]
    blocks = [
        f"{setup['dtype']}, {setup['num_tokens']} tokens a response, {setup['threads']} threads, "
        f"{setup['rounds']} rounds.",
        "; ".join(f"{name}: {', '.join(f'{k} {v}' for k, v in of.items())}" for name, of in versions.items()),
        *report["notes"],
        f"Each cell: tokens/s of the median round (lowest – highest), and times {BASE} of the same rounds: "
        "geometric mean with a 95 % interval.",
    ]
    for temperature in dict.fromkeys(cell["temperature"] for cell in report["cells"]):
        cells = [cell for cell in report["cells"] if cell["temperature"] == temperature]
        blocks += [
            f"## Temperature {temperature:g}",
            _speeds(cells),
            "Verdicts, times as fast:",
            _verdicts(cells),
            "Tokens/s without the prompts · seconds for these · accept length · cores in use:",
            _details(cells),
        ]
    return markdown(f"{report['subject']}: our engine beside vLLM and llama.cpp", report, *blocks)


def _names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["competitors"]))


def _grid(cells: Sequence[Mapping[str, Any]], say: Any) -> str:
    """Returns a table of competitors by batch sizes."""
    rows = [
        [name, *(say(cell["competitors"][name]) if name in cell["competitors"] else "–" for cell in cells)]
        for name in _names(cells)
    ]
    return table(["", *(f"batch {cell['batch_size']}" for cell in cells)], rows)


def _speeds(cells: Sequence[Mapping[str, Any]]) -> str:
    def say(figures: Mapping[str, Any]) -> str:
        low, high = map(speed_text, figures["range"])
        median, ratio = speed_text(figures["tokens_per_second"]), ratio_text(figures["over_base"])
        return f"{median} ({low} – {high}) · {ratio}"

    return _grid(cells, say)


def _verdicts(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for cell in cells:
        row = [str(cell["batch_size"])]
        for name in (BASE, "tlt-cold"):
            found = cell["verdicts"].get(name)
            row.append("–" if found is None else f"{ratio_text(found['ratio'])} of {found['beside']}")
        rows.append([*row, "yes" if cell["verdicts"]["same_tokens"] else "no"])
    columns = [
        "batch",
        f"{BASE} / fastest that is off",
        "tlt-cold / fastest of all others",
        "the law's tokens all equal",
    ]
    return table(columns, rows)


def _details(cells: Sequence[Mapping[str, Any]]) -> str:
    def say(figures: Mapping[str, Any]) -> str:
        decoded, accepted = speed_text(figures["decoded_per_second"]), number(figures["accept_length"])
        return f"{decoded} · {figures['first_seconds']:.2f} · {accepted} · {figures['cores']:.1f}"

    return _grid(cells, say)
