"""The charts of speculation say what the records and spans say."""

from pathlib import Path

from tests.unit.apps.page.synthetic import make_run
from tlt.apps.page.gather import read_run
from tlt.apps.page.shapes import Cells
from tlt.apps.page.speculation import batch_chart
from tlt.apps.page.timing import read_times


def test_strategies_share_the_engines_time_at_each_batch_size(tmp_path: Path) -> None:
    time = read_times(read_run(make_run(tmp_path / "run"), "run"))
    chart = batch_chart(time.run, time.read)
    assert chart is not None
    (cells,) = chart.shapes
    assert isinstance(cells, Cells)
    assert (cells.rows, cells.columns) == (["learned:4x1x4", "off"], ["1", "2", "3–4"])
    assert cells.shares.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert cells.notes[0][0] == "100 % of the time at this batch size, 40 tokens/s"
