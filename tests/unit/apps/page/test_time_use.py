"""Each instant of a step is in one use, and a step's spans are found wherever they stand in a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.apps.page.synthetic import BEGAN, STEP_SECONDS, make_run
from tlt.apps.page.gather import read_run
from tlt.apps.page.time_use import Piece, cut, read_step, spans_between
from tlt.base.spans import Span


def test_each_instant_belongs_to_the_innermost_span_and_the_pieces_fill_the_step() -> None:
    spans = [
        Span("update", 7.0, 12.0),
        Span("speculate", 1.0, 5.0),
        Span("journal", 2.0, 3.0),
        Span("step", 0.0, 9.0),  # a container is no use
    ]
    assert cut(spans, 9.0) == [
        Piece("other", 0.0, 1.0),
        Piece("drafts", 1.0, 2.0),
        Piece("scores, journal", 2.0, 3.0),
        Piece("drafts", 3.0, 5.0),
        Piece("other", 5.0, 7.0),
        Piece("update", 7.0, 9.0),
    ]


def test_seconds_by_use_are_the_steps_seconds(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"), "run")
    time = read_step(run, run.steps[3])
    assert time is not None
    assert sum(time.seconds_by_use().values()) == pytest.approx(STEP_SECONDS)
    uses = {use: round(seconds, 6) for use, seconds in time.seconds_by_use().items() if seconds > 1e-6}
    assert uses == {"prefill": 0.5, "decode": 2.0, "drafts": 3.0, "waiting": 0.5, "update": 3.0, "other": 1.0}


def test_curves_add_up_to_the_tokens_and_to_the_responses_of_all_ranks(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", num_ranks=2), "run")
    time = read_step(run, run.steps[0])
    assert time is not None
    x, running, tokens = time.curves()
    width = x[1] - x[0]
    assert tokens.sum() * width == pytest.approx(2 * (80 + 120))
    assert running[np.searchsorted(x, 2.0)] == pytest.approx(2 * 4)
    assert running[np.searchsorted(x, 5.0)] == pytest.approx(2 * 1)
    assert running[-1] == 0


@pytest.mark.parametrize("step", [1, 60, 120])
def test_a_steps_spans_are_found_in_a_long_file_with_damaged_lines(tmp_path: Path, step: int) -> None:
    path = make_run(tmp_path / "run", num_steps=120, num_ranks=1) / "timeline.rank0.jsonl"
    lines = path.read_text().splitlines()
    for place in range(7, len(lines), 50):
        lines[place] = lines[place][:20]  # torn
    path.write_text("\n".join(lines))
    start = BEGAN + STEP_SECONDS * (step - 1)
    sound = [json.loads(line) for line in lines if line.endswith("]")]
    expected = [row for row in sound if row[1] < start + STEP_SECONDS and row[2] > start]
    found = list(spans_between(path, start, start + STEP_SECONDS))
    assert [(span.name, span.start, span.end) for span in found] == [tuple(row[:3]) for row in expected]
