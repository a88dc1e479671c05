"""The charts of speculation say what the records and spans say."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.unit.apps.page.synthetic import make_run
from tlt.apps.page.gather import RunRecords, read_run
from tlt.apps.page.shapes import Cells, Line
from tlt.apps.page.speculation import age_chart, batch_chart, depth_chart, drafter_ages
from tlt.apps.page.timing import read_times
from tlt.base.records import DrafterCheck


def with_versions(run: RunRecords, versions: list[int]) -> RunRecords:
    steps = [
        replace(record, drafter=DrafterCheck(version=version))
        for record, version in zip(run.steps, versions, strict=True)
    ]
    return replace(run, steps=steps)


def test_a_drafters_age_counts_from_the_step_that_published_it(tmp_path: Path) -> None:
    run = with_versions(read_run(make_run(tmp_path / "run"), "run"), [0, 1, 1, 1, 2, 2])
    assert np.array_equal(drafter_ages(run), [np.nan, np.nan, 1, 2, 3, 1], equal_nan=True)
    chart = age_chart([run])
    assert chart is not None
    (line,) = chart.shapes
    assert isinstance(line, Line)
    lengths = run.values("rollout/accept_length")
    assert line.x.tolist() == [1, 2, 3]
    assert line.y.tolist() == [(lengths[2] + lengths[5]) / 2, lengths[3], lengths[4]]


def test_acceptance_by_depth_is_told_for_early_and_late_steps(tmp_path: Path) -> None:
    chart = depth_chart([read_run(make_run(tmp_path / "run"), "run")])
    assert chart is not None
    assert [(shape.label, shape.y.tolist()) for shape in chart.shapes if isinstance(shape, Line)] == [
        ("first fifth of the steps", [0.9, 0.8, 0.5]),
        ("last fifth", [0.9, 0.8, 0.5]),
    ]


def test_strategies_share_the_engines_time_at_each_batch_size(tmp_path: Path) -> None:
    time = read_times(read_run(make_run(tmp_path / "run"), "run"))
    chart = batch_chart(time.run, time.read)
    assert chart is not None
    (cells,) = chart.shapes
    assert isinstance(cells, Cells)
    assert (cells.rows, cells.columns) == (["learned:4x1x4", "off"], ["1", "2", "3–4"])
    assert cells.shares.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert cells.notes[0][0] == "100 % of the time at this batch size, 40 tokens/s"
