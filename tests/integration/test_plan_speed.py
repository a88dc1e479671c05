"""`tlt plan speed` on what a real run has kept: its own lengths, and the costs and acceptance in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tests.integration.test_run import PATIENCE
from tlt.simulate.expectation import ADAPTIVE, TLT, simulate
from tlt.simulate.recorded import ENOUGH_STEPS, assume_recorded, num_measured, read_run
from tlt.types import Strategy

pytestmark = pytest.mark.timeout(3 * PATIENCE)
SHORT = ("--run.num_ranks", "1", "--run.num_steps", "2", "--evaluation.num_problems", "0")


def test_a_run_of_two_steps_is_enough_to_simulate_its_steps_on_one_replica_and_on_more(
    workspace: Path, tlt_here: Tlt, tmp_path: Path
) -> None:
    recipe, folder = str(workspace / "run.toml"), workspace / "measured"
    assert tlt_here("train", recipe, "--run.out_dir", str(folder), "--run.keep_responses", "true", *SHORT) == 0
    run = read_run(folder)
    assumed = assume_recorded(run, run.config)
    found = simulate(assumed, TLT, 1, run.config.rollout.problems_per_step, range(2))
    assert [step.num_tokens for step in found] == [step.num_tokens for step in run.steps]
    assert [step.other_seconds for step in found] == assumed.other_seconds
    real, simulated = (sum(step.rollout_seconds for step in steps) for steps in (run.steps, found))
    assert 0.1 < simulated / real < 10, "seconds of this very run, not of another machine"

    out = tmp_path / "speed.json"
    words = ("--run", str(folder), "--replicas", "1,3", "--steps", "1", "--out", str(out), *SHORT)
    assert tlt_here("plan", "speed", recipe, *words) == 0
    written = json.loads(out.read_text())
    assert [row["num_responses"] for row in written["rows"]] == [16, 48]
    names = [one["variant"] for one in written["rows"][0]["variants"]]
    assert ADAPTIVE.name in names
    assert ("off" in names) == (num_measured(run, Strategy.OFF) >= ENOUGH_STEPS)
    assert any("those of the 2 steps" in line for line in written["assumptions"])
