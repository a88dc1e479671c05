"""The pages' figures are those of evidence.json, and each can be measured by a program of this tree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.evidence import MADE, PYPI, enter, has_changed, look_up
from benchmarks.evidence_pages import ROOT, Evidence, cell, pages, read_evidence, render, source, with_tables
from benchmarks.figures import FIGURES, MEASUREMENTS, TABLES
from tlt.base.types import UserError

FOUND = Evidence(
    value=1.731,
    low=1.63,
    high=1.83,
    unit="speedup",
    base=12.86,
    commit="90150ed",
    date="2026-11-20",
    machine="",
    load=None,
    steal=None,
    others=None,
    command="",
    minutes=None,
    report="benchmarks/results/train-headline.md",
)


def test_the_pages_are_as_evidence_has_them() -> None:
    """`python -m benchmarks.evidence --write` makes them so."""
    assert pages(read_evidence()) == {
        page: (ROOT / page).read_text(encoding="utf-8") for page in pages(read_evidence())
    }


def test_at_most_25_figures_are_cited_and_each_stands_in_a_table() -> None:
    cited = {
        name.partition(".")[0]
        for one in TABLES.values()
        for row in one.rows
        for text in row[one.num_words :]
        for name in text.split()
    }
    assert len(FIGURES) == sum(len(one.figures) for one in MEASUREMENTS.values()) <= 25
    assert cited == set(FIGURES)
    assert all(len(row) == len(one.columns) for one in TABLES.values() for row in one.rows)


def test_every_measurement_names_a_program_and_paths_that_exist() -> None:
    for name, one in MEASUREMENTS.items():
        program = one.command.split()[0].replace(".", "/")
        assert (ROOT / f"{program}.py").exists() or (ROOT / program / "__main__.py").exists(), name
        assert [path for path in one.paths if not (ROOT / path).exists()] == []
        assert set(re.findall(r"{(\w+)}", one.command)) <= {"out", "vllm", *PYPI, *MADE}
    assert [e.report for e in read_evidence().values() if not (ROOT / e.report).exists()] == []


def test_a_place_in_a_report_is_found_by_keys_indices_and_values() -> None:
    report = {"cells": [{"batch": 1, "speed": {"off": 2}}, {"batch": 16, "speed": {"off": 3}}]}
    assert look_up(report, "cells.batch=16.speed.off") == 3
    assert look_up(report, "cells.0.batch") == 1
    with pytest.raises(StopIteration):
        look_up(report, "cells.batch=4.speed")


def test_cells_tell_interval_base_and_shares() -> None:
    shares = replace(FOUND, value=0.727, low=None, high=None, unit="solved", base=0.621)
    found = {"a": FOUND, "b": shares, "c": replace(FOUND, low=None, high=None, base=1569.0)}
    names = ("a", "a.base", "b", "c c.base", "", "unknown")
    expected = ["1.73 (1.63 to 1.83)", "12.9", "62.1 % → 72.7 %", "1.73 · 1,569", "–", "–"]
    assert [cell(name, found) for name in names] == expected


def test_a_figure_of_an_earlier_tree_is_marked_and_linked_from_its_page() -> None:
    link = "[90150ed](../benchmarks/results/train-headline.md)"
    assert source([FOUND, FOUND], "docs/results.md") == link
    assert source([replace(FOUND, is_earlier=True)], "docs/results.md") == f"{link}, earlier"


def test_a_row_without_a_measured_figure_is_left_out() -> None:
    table = TABLES["steps"]
    assert len(render(table, {}).splitlines()) == 2
    assert len(render(table, {"headline-ahead": FOUND}).splitlines()) == 3


def test_a_page_without_a_tables_marks_is_refused() -> None:
    with pytest.raises(UserError, match=r"README\.md: has no lines <!-- evidence: first screen -->"):
        with_tables("README.md", "# TLT\n", {})


def test_a_report_is_entered_without_the_folder_it_was_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "git", lambda *words: "2026-11-29")
    measured = {"mean": 2.0, "low": 1.9, "high": 2.1}
    report = {
        "command": f"python -m benchmarks.rollout x --out {tmp_path}/here/longtail",
        "environment": {"commit": "90150ed", "cpu": "two cores", "python": "3.11.7", "torch": "2.13.0"},
        "measurements": [
            {"kind": "longtail", "ratios": {"adaptive": measured}, "tokens_per_second": {"off": 1921.0}}
        ],
    }
    path = tmp_path / "here" / "longtail.json"
    path.parent.mkdir()
    path.write_text(json.dumps(report))
    name = "rollout-longtail"
    found = enter(name, MEASUREMENTS[name], path, {"load": 0.3, "steal": 0.0, "others": 0.01, "minutes": 2.5})
    assert found["longtail"] == Evidence(
        value=2.0,
        low=1.9,
        high=2.1,
        unit="speedup",
        base=1921.0,
        commit="90150ed",
        date="2026-11-29",
        machine="two cores; Python 3.11.7, torch 2.13.0",
        load=0.3,
        steal=0.0,
        others=0.01,
        command="python -m benchmarks.rollout x --out longtail",
        minutes=2.5,
        report="benchmarks/results/rollout-longtail.json",
    )
    assert str(tmp_path) not in (tmp_path / found["longtail"].report).read_text()


def test_an_unknown_commit_counts_as_earlier() -> None:
    assert has_changed("0" * 40, ["tlt"])


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        (
            "tlt/a.py",
            'def f():\n    """Old."""\n    return 1\n',
            "def f():\n    # new\n    return 1\n",
            False,
        ),
        ("tlt/a.py", "def f():\n    return 1\n", "def f():\n    return 2\n", True),
        ("tlt/a.py", "x = 1\n", None, True),
        ("tlt/kernel.cpp", "// old\n", "// new\n", True),
        ("tlt/engine/vllm/a.py", "x = 1\n", "x = 2\n", False),
        ("recipes/a.py", 'def tool():\n    """Old."""\n', 'def tool():\n    """New."""\n', True),
    ],
)
def test_a_figure_is_of_an_earlier_tree_once_its_paths_compute_something_else(
    name: str, before: str, after: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    evidence.git("init", "-q")
    path = tmp_path / name
    for text in (before, after):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        evidence.git("add", "-A")
        evidence.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x")
    evidence.code.cache_clear()
    assert has_changed("HEAD~1", ["tlt", "recipes"]) == expected
    evidence.code.cache_clear()
