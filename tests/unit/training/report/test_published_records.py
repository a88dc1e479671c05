"""The step records that the repository publishes are read by the report of this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.training.report.step_record import read_metrics

PUBLISHED = sorted((Path(__file__).parents[4] / "benchmarks/results").glob("*/metrics.jsonl"))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.parent.name)
def test_a_published_record_is_read(file: Path) -> None:
    assert [step.step for step in read_metrics(file)] == list(
        range(1, len(file.read_text().splitlines()) + 1)
    )
