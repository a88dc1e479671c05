"""A run whose ranks and launcher are killed again and again; `python -m benchmarks.faults.kills` does it 200 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.kills import difference, make_workspace, recoveries, run_with
from benchmarks.faults.victim import ANYWHERE, LAUNCHER, Kill

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


@pytest.mark.timeout(900)
def test_after_eight_kills_the_run_is_the_one_never_killed_and_nothing_of_a_journal_was_generated_twice(tmp_path: Path) -> None:
    make_workspace(tmp_path, num_steps=5)
    whole = run_with(tmp_path, "whole", [])
    assert whole["outcome"] == "ended", whole["outcome"]
    killed = run_with(tmp_path, "killed", PLAN)
    assert killed["outcome"] == "ended", killed["outcome"]
    assert not difference(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
    assert len(recoveries(PLAN, killed["events"])) == len(PLAN), killed["events"]
    assert not [event["twice"] for event in killed["events"] if "twice" in event]
    died = "rank 1 ended without a word: killed by SIGKILL (out of memory?)"
    assert f"{died}; starting again from the beginning (restart 1 of 11)" in killed["said"]
