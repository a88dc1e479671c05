"""`tlt plan speed` on what a real run has kept: its lengths, and its tuner's costs and acceptance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tests.integration.test_run import PATIENCE
from tlt.cli.plan_speed import run_in
from tlt.plan.recorded import assume_recorded
from tlt.plan.speed import expect

pytestmark = pytest.mark.timeout(3 * PATIENCE)
SHORT = ("--run.num_ranks", "1", "--run.num_steps", "2", "--evaluation.num_problems", "0")


def test_a_run_of_two_steps_is_enough_to_tell_its_steps_on_one_replica_and_on_more(
    workspace: Path, tlt_here: Tlt, tmp_path: Path
) -> None:
    recipe, folder = str(workspace / "run.toml"), workspace / "measured"
    kept = ("--run.out_dir", str(folder), "--run.keep_responses", "1")
    assert tlt_here("train", recipe, *kept, *SHORT) == 0
    run = run_in(folder)
    assert [sum(map(sum, groups)) for groups in run.lengths] == [
        step.rollout.num_tokens for step in run.steps
    ]
    assumed = assume_recorded(run, run.config)
    of_second = replace(assumed, steps=run.lengths[1:])
    *_, tlt = expect(of_second, 1, run.config.rollout.problems_per_step, 1).variants
    assert tlt.rollout_seconds == pytest.approx(run.steps[1].rollout.seconds), "it is held to this very step"
    assert 0.1 < assumed.tlt.mean < 10, "seconds of this very run, not of another machine"

    out = tmp_path / "speed.json"
    words = ("--run", str(folder), "--replicas", "1,3", "--steps", "1", "--out", str(out), *SHORT)
    assert tlt_here("plan", "speed", recipe, *words) == 0
    written = json.loads(out.read_text())
    assert [row["num_responses"] for row in written["rows"]] == [16, 48]
    names = [one["variant"] for one in written["rows"][0]["variants"]]
    assert ("off" in names) == (assumed.off is not None)
    assert any("those of the 2 steps" in line for line in written["assumptions"])
