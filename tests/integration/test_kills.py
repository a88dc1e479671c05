"""A run whose ranks and launcher are killed again and again. proofs/test_killed_runs.py does it at more
moments, and `python -m tests.faults.kills` 200 times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.faults.compare import difference
from tests.faults.kills import make_workspace, recoveries, run_with
from tests.faults.victim import ANYWHERE, LAUNCHER, Kill
from tests.integration.programs import Programs

pytestmark = pytest.mark.timeout(900)


def assert_killed_run_equals_whole_one(folder: Path, num_steps: int, plan: Sequence[Kill]) -> list[str]:
    """Runs both; nothing that stands in a journal is generated again. Returns what the killed run said."""
    make_workspace(folder, num_steps)
    whole = run_with(folder, "whole", [])
    assert whole["outcome"] == "ended", whole["outcome"]
    killed = run_with(folder, "killed", plan)
    assert killed["outcome"] == "ended", killed["outcome"]
    assert not difference(folder / "killed" / "run", folder / "whole" / "run")
    assert len(recoveries(plan, killed["events"])) == len(plan), killed["events"]
    assert not [event["twice"] for event in killed["events"] if "twice" in event]
    return str(killed["said"]).splitlines()


def test_after_kills_the_run_is_the_one_never_killed_and_nothing_of_a_journal_was_generated_twice(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.faults.kills.subprocess.run", partial(programs.run, forks=False)
    )  # the victim forks them
    plan = [
        Kill("decode", 1),
        Kill("journal", 1, 3),
        Kill(ANYWHERE, LAUNCHER, seconds=0.5),
    ]
    said = assert_killed_run_equals_whole_one(tmp_path, 3, plan)
    line = next(line for line in said if "(restart 1 of " in line)
    died = "tlt: rank 1 ended without a word: killed by SIGKILL (out of memory?)"
    assert line.startswith(f"{died}; starting again from the beginning"), "it may have a journal already"
