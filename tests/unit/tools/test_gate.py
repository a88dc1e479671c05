"""The gate of history: what no clock decides is as earlier commits had it, and bands see what leaves them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gate import BANDS, Line, appended, clockless, is_within, limits, read_history, software_here

LINE = Line("off", 4.0, "e6c1b97a", "2026-11-29", "two cores")


def test_what_no_clock_decides_is_within_its_bands() -> None:
    """`python -m benchmarks.gate --clockless --accept` takes a change that is meant."""
    history, here = read_history(), software_here()
    lines = [Line(name, value, "", "", here) for name, value in clockless().items()]
    assert [line for line in lines if not is_within(line, history)] == []
    assert {line.figure for line in lines} == {name for name, band in BANDS.items() if not band.is_clocked}


def test_a_tenth_less_is_outside_and_noise_within() -> None:
    history = [replace(LINE, value=value) for value in (9.0, 9.0, 3.9, 4.0, 4.1, 4.0, 4.2)]
    assert limits(LINE, history) == (0.94 * 4.0, float("inf"))
    assert is_within(replace(LINE, value=3.9), history)
    assert not is_within(replace(LINE, value=3.6), history)


def test_figures_of_another_machine_are_not_compared() -> None:
    history = [replace(LINE, value=40.0, machine="64 cores"), replace(LINE, value=40.0, figure="speedup")]
    assert limits(LINE, history) is None
    assert is_within(LINE, history)


def test_an_absolute_band_needs_no_history() -> None:
    assert not is_within(replace(LINE, figure="equal", value=0.99), [])
    assert is_within(replace(LINE, figure="gap", value=1e-6), [])
    assert not is_within(replace(LINE, figure="gap", value=1e-4), [])


def test_a_commit_has_one_line_a_figure_and_machine() -> None:
    again = replace(LINE, value=4.1)
    other = replace(LINE, commit="abfb5203")
    assert appended([LINE, other], [again]) == [other, again]
