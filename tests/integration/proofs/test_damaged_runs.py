"""Every value of a run's files, replaced by each of two dozen odd ones: `tlt status` shows the run or says one
line; for `tlt report` a large sample is tried, as a page takes a second."""

from __future__ import annotations

from pathlib import Path

from tests.unit.apps.page.damage import damages, make_sound, sample, show_page, show_status, surprises
from tests.unit.apps.page.synthetic import make_run
from tlt.apps.page.render import make_page

READ_BY_STATUS = ("metrics.jsonl", "evaluations.jsonl", "config.json")


def test_status_knows_no_traceback(tmp_path: Path) -> None:
    sound = make_sound(tmp_path / "run")
    todo = [one for one in damages(sound) if one[0] in READ_BY_STATUS]
    assert surprises(sound, todo, show_status) == []


def test_report_knows_no_traceback(tmp_path: Path) -> None:
    sound = make_sound(tmp_path / "run")
    assert surprises(sound, sample(sound, 60, seed=1), show_page) == []


def test_a_thousand_steps_make_a_page_below_5_mb(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", num_steps=1000)
    assert len(make_page([run]).encode()) < 5_000_000  # in two seconds: docs/report.md
