"""The long tail beside off: what is measured is what is said. Timings decide nothing here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.command import carry_out
from benchmarks.rollout import main, side_by_side
from tests.lossless.helpers import CONFIG, make_engine, make_policy
from tlt.speculative.strategy import Strategy
from tlt.tuning.tuner import Fixed
from tlt.types import Request, SamplingParams

POLICY = make_policy()


def test_whole_rollouts_side_by_side_do_the_same_work_and_responses_that_differ_are_counted() -> None:
    rng, params = random.Random(0), SamplingParams(max_tokens=40)
    work = [
        Request(f"{i}", 0, tuple(rng.randrange(CONFIG.vocab_size) for _ in range(4)), params)
        for i in range(6)
    ]
    long = Strategy("learned", 6, 1, 6)
    traces, num_different = side_by_side(
        {"off": lambda: make_engine(POLICY), "on": lambda: make_engine(POLICY, Fixed(long))},
        work,
        num_rounds=2,
    )
    assert num_different == 0
    assert {name: len(ts) for name, ts in traces.items()} == {"off": 2, "on": 2}
    assert all(measured.seconds > 0 for ts in traces.values() for measured in ts)
    assert {*traces["on"][0].strategy_seconds} == {str(long)}
    _, other = side_by_side(
        {"off": lambda: make_engine(POLICY), "wrong": lambda: make_engine(make_policy(seed=9))},
        work,
        num_rounds=1,
    )
    assert other > 0


RECIPE = Path(__file__).parents[3] / "recipes/countdown"
FEW = ("--task.num_problems", "64")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--variants", "fast"], "'fast' is no strategy"),
        (["--workload", "nowhere.json"], "nowhere.json: does not exist"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "x"), "--run.num_ranks", "1"]
    words = [str(RECIPE / "quickstart.toml"), *out, *FEW, *arguments]
    assert carry_out("rollout", lambda: main(words)) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("benchmarks.rollout: error: ")
    assert error.count("\n") == 0
    assert part in error


def test_the_command_measures_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Small, with the shipped model."""
    whole = json.loads((RECIPE / "longtail.json").read_text())
    whole["requests"] = sorted(whole["requests"], key=lambda r: r["length"])[:6]
    (tmp_path / "few.json").write_text(json.dumps(whole))
    arguments = ["--out", str(tmp_path / "result"), "--workload", str(tmp_path / "few.json")]
    main([str(RECIPE / "quickstart.toml"), *arguments, "--rounds", "2", *FEW])
    assert "longtail, 6 requests" in capsys.readouterr().out
    report = json.loads((tmp_path / "result.json").read_text())
    (longtail,) = report["measurements"]
    assert longtail["num_different"] == 0
    assert {"off", "adaptive"} == longtail["tokens_per_second"].keys()
    assert report["command"].startswith("python -m benchmarks.rollout ")
    assert "| adaptive |" in (tmp_path / "result.md").read_text()
    assert str(RECIPE.parents[1]) not in json.dumps(report["config"])
