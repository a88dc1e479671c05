"""Engines side by side and `tlt bench rollout`: what is measured is what is said. Timings decide nothing
here."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.lossless.helpers import CONFIG, make_engine, make_policy
from tlt.bench.report import environment
from tlt.bench.rollout import constant_batch
from tlt.cli.main import main
from tlt.report.ratio import Ratio
from tlt.speculative.strategy import Strategy
from tlt.tuning.tuner import Fixed
from tlt.types import Request, SamplingParams

SHORT = Strategy("learned", 2, 1, 2)
POLICY = make_policy()


def requests(helping: int, num: int = 4) -> list[Request]:
    rng = random.Random(helping)
    params = SamplingParams(max_tokens=40)
    return [
        Request(f"{helping}/{i}", 0, tuple(rng.randrange(CONFIG.vocab_size) for _ in range(4)), params)
        for i in range(num)
    ]


def test_an_interval_covers_the_true_ratio_nineteen_times_of_twenty() -> None:
    """2,000 intervals of 6 paired rounds: between 93.5 % and 96.5 % cover (3 standard errors)."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        ratio = Ratio.of(list(np.exp(math.log(1.3) + rng.normal(0, 0.2, size=6))))
        assert ratio.low < ratio.mean < ratio.high
        covered += ratio.low <= 1.3 <= ratio.high
    assert 0.935 < covered / 2000 < 0.965


def test_a_constant_batch_stays_constant_and_every_engine_gets_every_round() -> None:
    engines = {
        "off": make_engine(POLICY, max_batch_size=3),
        "on": make_engine(POLICY, Fixed(SHORT), max_batch_size=3),
    }
    seen = []
    original = engines["on"].step
    engines["on"].step = lambda: (seen.append(len(engines["on"].running)), original())[1]
    speeds = constant_batch(engines, requests, batch_size=3, num_rounds=3, seconds=0.05)
    assert {name: len(values) for name, values in speeds.items()} == {"off": 3, "on": 3}
    assert all(value > 0 for values in speeds.values() for value in values)
    assert statistics.mode(seen) == 3


RECIPE = Path(__file__).parents[3] / "recipes/countdown"
FEW = ("--task.num_problems", "64")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--batches", "1,x"], "--batches: is x; it must be a valid integer"),
        (["--batches", "0"], "--batches: is 0; it must be greater than or equal to 1"),
        (["--variants", "fast"], "'fast' is no strategy"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = str(RECIPE / "quickstart.toml")
    code = main(
        ["bench", "rollout", recipe, "--out", str(tmp_path / "x"), "--run.num_ranks", "1", *FEW, *arguments]
    )
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert error.count("\n") == 0
    assert part in error


def test_the_command_measures_a_constant_batch_and_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Small, with the shipped model."""
    arguments = ["--out", str(tmp_path / "result")]
    amounts = ["--batches", "1,2", "--rounds", "2", "--seconds", "0.1", *FEW]
    assert main(["bench", "rollout", str(RECIPE / "quickstart.toml"), *arguments, *amounts]) == 0
    assert "constant batch 2: off " in capsys.readouterr().out
    report = json.loads((tmp_path / "result.json").read_text())
    assert [(m["kind"], m["batch_size"]) for m in report["measurements"]] == [
        ("constant", 1),
        ("constant", 2),
    ]
    assert "## Constant batch" in (tmp_path / "result.md").read_text()
    assert str(RECIPE.parents[1]) not in json.dumps(report["config"])


def test_the_commit_is_that_of_the_code_wherever_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment()["commit"]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert environment()["commit"] == here
