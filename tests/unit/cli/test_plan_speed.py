"""`tlt plan speed`: its table and figures, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.parts import fail, succeed
from tlt.config.load import load_config

SMALL = ("--sampling.max_tokens", "60", "--steps", "1", "--replicas", "1,2")


def test_the_command_prints_a_row_for_each_number_of_replicas_and_what_it_rests_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = succeed(capsys, "plan", "speed", "countdown", *SMALL, "--out", "speed.json")
    assert found["replicas"].keys() == {"1", "2"}
    written = json.loads((here / "speed.json").read_text())
    assert [row["num_replicas"] for row in written["rows"]] == [1, 2]
    assert [row["num_responses"] for row in written["rows"]] == [32, 64], (
        "each replica has its share of the recipe's step"
    )
    assert found["replicas"]["2"]["off"] == 1.0
    assert written["factors_of"] == found["factors_of"]
    assert "arXiv 2511.16665" in found["factors_of"], "the factors are no measurement of the user's model"
    assert "not of your model; give --run" in found["factors_of"]
    assert any("log-normal" in line for line in written["assumptions"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "0"), "--replicas: is"),
        (("--run", "nowhere"), "--run: nowhere is no run's folder"),
        (("--median-tokens", "50", "--p95-tokens", "40"), "--p95-tokens: is 40, not above the median of 50"),
        (("--rollout-share", "2"), "--rollout-share: is"),
        (("--out", f"{__file__}/speed.json"), f"--out: {__file__} is no folder; give another path"),
    ],
)
def test_a_mistake_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert fail(capsys, "plan", "speed", "countdown", *words).startswith(message)


def test_a_run_that_has_finished_no_step_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text(load_config("countdown", []).to_json())
    (here / "run" / "metrics.jsonl").write_text("")
    message = fail(capsys, "plan", "speed", "countdown", "--run", "run")
    assert message == "--run: run has finished no step, which costs are read from; give a run that has ended"
