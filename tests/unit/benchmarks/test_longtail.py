"""The long-tail workload: which requests are chosen, and that its file is believed only for the model it
was made for."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.longtail import (
    LengthShape,
    _assign,
    choose_requests,
    hash_model,
    make_longtail,
    measure_lengths,
    read_workload,
    target_ratios,
    write_workload,
)
from tests.lossless.helpers import STOP, make_engine, make_policy
from tlt.types import Problem, Request, SamplingParams, UserError

RECIPE = Path(__file__).parents[3] / "recipes" / "countdown"


def request(index: int, max_tokens: int = 2048) -> Request:
    return Request(
        f"p{index}", 0, (1, 2 + index % 7), SamplingParams(max_tokens=max_tokens, stop_ids=(STOP,))
    )


def candidates(num: int, seed: int, scale: float = 100.0, spread: float = 1.2) -> dict[Request, int]:
    """Log-normal lengths, wider than the shape and cut at 2,048."""
    rng = random.Random(seed)
    return {request(i): min(2048, 2 + int(scale * math.exp(spread * rng.gauss(0, 1)))) for i in range(num)}


def test_the_wanted_lengths_are_one_to_four_to_ten() -> None:
    for num in (64, 128, 1000):
        ratios = target_ratios(num)
        assert ratios == sorted(ratios)
        assert ratios[-1] == pytest.approx(10.0)
        median, p95 = np.interp([0.5, 0.95], (np.arange(num) + 0.5) / num, ratios)
        assert median == pytest.approx(1.0, rel=0.02)
        assert p95 == pytest.approx(4.0, rel=0.05)


def test_the_chosen_lengths_have_the_shape() -> None:
    given = candidates(800, seed=3)
    chosen = choose_requests(given, 128)
    assert len(chosen) == 128
    shape = LengthShape.of(list(chosen.values()))
    assert shape.p95 / shape.p50 == pytest.approx(4.0, rel=0.08)
    assert shape.longest / shape.p50 == pytest.approx(10.0, rel=0.08)


def test_choosing_does_not_depend_on_the_order_of_the_candidates_but_keeps_it() -> None:
    given = candidates(200, seed=5)
    shuffled = dict(random.Random(0).sample(list(given.items()), len(given)))
    chosen, again = choose_requests(given, 40), choose_requests(shuffled, 40)
    assert chosen == again
    assert list(chosen) == [r for r in given if r in chosen]
    assert list(again) == [r for r in shuffled if r in chosen]


def test_a_response_that_was_cut_off_is_never_chosen() -> None:
    given = {request(i, max_tokens=50): length for i, length in enumerate([*range(1, 41), *[50] * 100])}
    assert max(choose_requests(given, 20).values()) <= 40
    with pytest.raises(UserError, match="40 candidates ended by themselves but 41 are wanted"):
        choose_requests(given, 41)
    with pytest.raises(UserError, match="at least 20"):
        choose_requests(given, 19)


def test_the_assignment_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        targets, logs = np.sort(rng.normal(size=3)), np.sort(rng.normal(size=6))
        cost, columns = _assign(targets, logs)
        everything = [
            (sum((targets[i] - logs[j]) ** 2 for i, j in enumerate(order)), order)
            for order in itertools.permutations(range(6), 3)
        ]
        assert cost == pytest.approx(min(everything)[0])
        assert len(set(columns)) == 3
        assert cost == pytest.approx(sum((targets[i] - logs[j]) ** 2 for i, j in enumerate(columns)))


def test_the_shape_is_read_off_by_nearest_rank() -> None:
    assert LengthShape.of(range(1, 101)) == LengthShape(50, 95, 100)
    assert str(LengthShape(100, 400, 1000)) == "p50 100, p95 400, max 1000 (1 : 4.00 : 10.00)"


def test_measured_lengths_are_those_of_the_responses() -> None:
    problems = [Problem(f"p{i}", (1, 2 + i)) for i in range(3)]
    params = SamplingParams(max_tokens=12, stop_ids=(STOP,))
    policy, finished = make_policy(), list[int]()
    measured = measure_lengths(make_engine(policy), problems, params, 8, finished.append)
    assert [(r.problem_id, r.sample_index) for r in measured] == [(f"p{i % 3}", i // 3) for i in range(8)]
    assert finished == list(range(1, 9))
    responses = {
        (r.problem_id, r.sample_index): len(r.token_ids) for r in make_engine(policy).generate(measured)
    }
    assert {(r.problem_id, r.sample_index): length for r, length in measured.items()} == responses


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    workload = make_longtail(candidates(60, seed=1), 20, model_hash="ab" * 32)
    path = tmp_path / "workload.json"
    write_workload(path, workload, made_by="a test")
    assert read_workload(path, "ab" * 32) == workload
    assert read_workload(path) == workload
    with pytest.raises(
        UserError,
        match=r"workload.json: was made for a model with content hash abababababab…, not cdcdcdcdcdcd…",
    ):
        read_workload(path, "cd" * 32)


def test_a_file_that_cannot_be_believed_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    write_workload(path, make_longtail(candidates(60, seed=1), 20, "ab"), made_by="a test")
    raw = json.loads(path.read_text())
    broken = (
        ({**raw, "law_version": 0}, "law_version is 0"),
        (
            {key: value for key, value in raw.items() if key != "sampling"},
            "is no workload file .KeyError: 'sampling'",
        ),
        ({**raw, "requests": []}, "holds no requests"),
        ([], "is no workload file"),
    )
    for content, message in broken:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message) as caught:
            read_workload(path)
        assert "\n" not in str(caught.value)
    path.write_text("{")
    with pytest.raises(UserError, match="is no workload file"):
        read_workload(path)
    with pytest.raises(UserError, match="does not exist"):
        read_workload(tmp_path / "nowhere.json")


def test_the_shipped_workload_belongs_to_the_shipped_model_and_has_the_shape() -> None:
    workload = read_workload(RECIPE / "longtail.json", hash_model(RECIPE / "base"))
    assert (RECIPE / "longtail.json").stat().st_size < 150_000
    assert len(set(workload.requests)) == 128
    shape = workload.shape
    assert shape.p95 / shape.p50 == pytest.approx(4.0, rel=0.1)
    assert shape.longest / shape.p50 == pytest.approx(10.0, rel=0.1)
