"""A run that is killed at all moments of a step, and one that generates ahead, whose checkpoints hold
more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.compare import difference
from tests.faults.kills import generate_ahead, make_workspace, recoveries, run_with
from tests.faults.victim import ANYWHERE, LAUNCHER, Kill
from tests.integration.test_kills import assert_killed_run_equals_whole_one
from tlt.training.report.step_record import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLAN = [
    Kill("prefill", 1),
    Kill("decode", 0, 4),
    Kill("journal", 1, 3),
    Kill(ANYWHERE, LAUNCHER, seconds=0.5),
    Kill("update", 1),
    Kill("checkpoint", 1),
    Kill("publication", 0, 2),
    Kill("record", 0),
]


def test_after_eight_kills_the_run_is_the_one_never_killed(tmp_path: Path) -> None:
    assert_killed_run_equals_whole_one(tmp_path, 5, PLAN)


def test_after_kills_a_run_that_generates_ahead_is_the_one_never_killed_that_does_not(tmp_path: Path) -> None:
    """The responses of the step after a checkpoint may have been generated ahead of it, on the rank that
    is killed."""
    make_workspace(tmp_path, num_steps=5)
    whole = run_with(tmp_path, "whole", [])
    assert whole["outcome"] == "ended", whole["outcome"]
    generate_ahead(tmp_path, 1)
    plan = [
        Kill("decode", 1, 40),
        Kill("update", 0),
        Kill("checkpoint", 1),
        Kill("publication", 0, 2),
        Kill("record", 0),
    ]
    killed = run_with(tmp_path, "killed", plan)
    assert killed["outcome"] == "ended", killed["outcome"]
    assert not difference(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
    assert len(recoveries(plan, killed["events"])) == len(plan), killed["events"]
    records = read_metrics(tmp_path / "killed" / "run" / "metrics.jsonl")
    assert sum(record.idle.ahead_tokens for record in records) > 0
    assert sum(record.rollout.followed_by_age.get("1", 0) for record in records) > 0
