"""metrics.jsonl and the paired test."""

import dataclasses
import itertools
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
from tlt.training.report.record import MetricsWriter, paired_sign_flip_test, read_metrics


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


# -- the paired test -----------------------------------------------------------------------------------------


def brute_force_p(before: list[float], after: list[float]) -> float:
    differences = [b - a for a, b in zip(before, after, strict=True)]
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in patterns]
    return sum(value >= sum(differences) - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_sign_flip_test_equals_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    before, after = (generator.integers(0, 5, 9) / 4 for _ in range(2))
    assert paired_sign_flip_test(before.tolist(), after.tolist()) == brute_force_p(
        before.tolist(), after.tolist()
    )


def test_the_sampled_sign_flip_test_agrees_with_the_exact_one() -> None:
    generator = np.random.default_rng(1)
    before = generator.random(14)
    after = before + generator.normal(0.15, 0.4, 14)
    exact = paired_sign_flip_test(before, after)
    sampled = paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)
    assert 0.01 < exact < 0.9
    assert abs(sampled - exact) < 5 * math.sqrt(
        exact * (1 - exact) / 16_000
    )  # wrong once in 10^6; the seed is fixed
    assert sampled == paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)


def test_the_sign_flip_test_knows_its_extremes() -> None:
    assert paired_sign_flip_test([0.0] * 10, [1.0] * 10) == 2**-10
    assert paired_sign_flip_test([1.0] * 10, [0.0] * 10) == 1.0
    assert paired_sign_flip_test([0.5] * 300, [0.5] * 300) == 1.0
    assert paired_sign_flip_test([0.0] * 256, [1.0] * 256, num_permutations=999) == 1 / 1000
    with pytest.raises(ValueError, match="2 scores before and 1 after"):
        paired_sign_flip_test([1, 2], [1])
    with pytest.raises(ValueError, match="not finite"):
        paired_sign_flip_test([1.0], [math.nan])
