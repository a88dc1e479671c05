"""`tlt bench`: off and adaptive answer the same requests, and what is measured is what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lossless.helpers import make_engine, make_policy, make_requests
from tests.unit.apps.cli.parts import fail, succeed, write_lines
from tlt.apps.bench.speculation import ADAPTIVE, OFF, measure
from tlt.apps.cli.bench import summarize
from tlt.base.strategy import Strategy
from tlt.base.types import Request
from tlt.speculation.tuner.tuner import FixedTuner

RECIPE = Path(__file__).parents[4] / "recipes/countdown"


def test_both_engines_answer_each_round_and_the_first_does_not_count() -> None:
    policy = make_policy()
    engines = {
        OFF: make_engine(policy),
        ADAPTIVE: make_engine(policy, FixedTuner(Strategy("learned", 2, 1, 2))),
    }
    asked: list[int] = []

    def requests(index: int) -> list[Request]:
        asked.append(index)
        return make_requests(num_problems=2, num_samples=2, seed=index)

    said: list[str] = []
    found = measure(engines, requests, 2, said.append)
    assert asked == [0, 1, 2]
    assert [line.split(":")[0] for line in said] == ["round 1 of 2", "round 2 of 2"]
    assert found.num_different == 0
    for off, adaptive in zip(found.turns[OFF], found.turns[ADAPTIVE], strict=True):
        assert off.token_ids == adaptive.token_ids
    assert found.stats.num_tokens == sum(turn.num_tokens for turn in found.turns[ADAPTIVE])
    assert len(found.speedup.values) == 2


@pytest.mark.usefixtures("here")
def test_a_model_is_measured_on_the_users_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:11]"}, {"prompt": "[3,4:7]"})
    words = ("--prompts", "prompts.jsonl", "--num", "3", "--rounds", "2", "--max-tokens", "8")
    drafter = ("--drafter", str(RECIPE / "drafter"), "--samples", "2", "--dtype", "float64")
    record = succeed(capsys, "bench", str(RECIPE / "base"), *words, *drafter, "--out", "out.json")
    assert (record["responses"], record["num_different"]) == (3 * 2 * 2, 0)
    assert record["accept_length"] is None or record["accept_length"] >= 1
    assert len(record["speedup"]["values"]) == 2
    assert json.loads(Path("out.json").read_text())["environment"]["torch"]


@pytest.mark.parametrize(
    ("low", "high", "is_told"), [(0.9, 1.4, True), (1.1, 1.4, False), (None, None, True)]
)
def test_a_ratio_whose_interval_holds_1_is_called_not_resolved(
    low: float | None, high: float | None, is_told: bool
) -> None:
    record = {
        "speedup": {"mean": 1.2, "low": low, "high": high},
        "tokens_per_second": {"off": 1.0, "adaptive": 1.2},
        **{"num_different": 0, "responses": 2, "batch_size": 1, "accept_length": None, "device": "cpu"},
        "strategy_seconds": {},
    }
    assert ("not resolved" in summarize(record).headline) == is_told


@pytest.mark.usefixtures("here")
def test_what_a_run_says_itself_is_refused_and_a_model_needs_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text('{"run": {}}')
    told = fail(capsys, "bench", "run", "--temperature", "0.5")
    assert told.startswith("--temperature: run is a run, which is measured as its configuration says; leave")
    told = fail(capsys, "bench", str(RECIPE / "base"))
    assert told.startswith("--prompts: is missing; give the prompts to answer")
