"""metrics.jsonl."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training.report.records import record
from tlt.base.io.files import dumps
from tlt.base.records import LengthStats
from tlt.base.types import UserError
from tlt.training.report.step_record import MetricsWriter, read_metrics


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl", 0) as writer:
        writer.write(record(1))
    assert read_metrics(writer.path) == [record(1)]
    line = json.loads(writer.path.read_text())
    assert line["rollout"]["response_tokens"].keys() == {"mean", "p50", "p95", "max"}


def test_what_does_not_exist_is_null_in_the_file_and_nan_in_the_record(tmp_path: Path) -> None:
    empty = {"accept_length": math.nan, "draft_acceptance_rate_pos": ()}
    nothing = record(
        1, update={"grad_norm": math.inf}, rollout=dict(empty, response_tokens=LengthStats.of([]))
    )
    with MetricsWriter(tmp_path / "metrics.jsonl", 0) as writer:
        writer.write(nothing)
    text = writer.path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (back,) = read_metrics(writer.path)
    assert math.isnan(back.rollout.accept_length)
    assert math.isnan(back.rollout.response_tokens.mean)
    assert json.loads(dumps({"a": np.float32("nan"), "b": torch.tensor(2.5), "c": np.int64(3)})) == {
        "a": None,
        "b": 2.5,
        "c": 3,
    }


def test_resuming_drops_later_records_and_a_torn_line_and_never_repeats_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, 0) as writer:
        for step in range(1, 6):
            writer.write(record(step, update={"loss": 1.0}))
    with path.open("a") as file:
        file.write('{"step": 6, "reward_m')
    with MetricsWriter(path, 3) as writer:
        assert [r.step for r in read_metrics(path)] == [1, 2, 3]
        with pytest.raises(AssertionError):
            writer.write(record(3))
        writer.write(record(4, update={"loss": 2.0}))
        assert [(r.step, r.update.loss) for r in read_metrics(path)] == [
            (1, 1.0),
            (2, 1.0),
            (3, 1.0),
            (4, 2.0),
        ], "not flushed"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line", ['{"step": 1}', "nonsense", "[]", "3", dumps(dataclasses.asdict(record(1)) | {"surplus": 1})]
)
def test_a_line_that_is_no_record_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(record(0).to_json() + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(UserError, match=r"no such file"):
        read_metrics(tmp_path / "other.jsonl")
