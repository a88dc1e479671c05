"""A run keeps each step's responses, also where it goes on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Tlt
from tests.integration.test_run import PATIENCE, records
from tlt.training.saved.kept_responses import kept_by

pytestmark = pytest.mark.timeout(3 * PATIENCE)


@pytest.fixture
def first(workspace: Path, tlt_here: Tlt) -> Path:
    """A run of three steps on one rank that has kept its responses, made once."""
    if not (workspace / "first").exists():
        few = ("--run.num_ranks", "1", "--run.num_steps", "3", "--evaluation.every", "2")
        words = ("--run.out_dir", str(workspace / "first"), *few, "--drafter.train", "false")
        assert tlt_here("train", str(workspace / "run.toml"), *words) == 0
    return workspace / "first"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_keeps_each_steps_responses_with_their_rewards(first: Path) -> None:
    assert [path.name for path in kept_by(first, "rollout")] == [
        f"rollout-0000000{step}.jsonl" for step in (1, 2, 3)
    ]
    assert [path.name for path in kept_by(first, "evaluation")] == [
        f"evaluation-0000000{step}.jsonl" for step in (0, 2, 3)
    ]
    for record in records(first):
        kept = lines(first / "responses" / f"rollout-0000000{record.step}.jsonl")
        assert len(kept) == record.rollout.num_responses == 16
        assert sum(len(one["token_ids"]) for one in kept) == record.rollout.num_tokens
        assert sum(one["reward"] for one in kept) / 16 == pytest.approx(record.rewards.mean)
        assert {(one["purpose"], one["policy_step"], one["policy_version"]) for one in kept} == {
            ("rollout", record.step - 1, record.policy_version)
        }
        assert all(
            isinstance(one["text"], str) and one["prompt_ids"] and one["finish_reason"] in ("stop", "length")
            for one in kept
        )
    assert {one["policy_version"] for one in lines(first / "responses" / "evaluation-00000002.jsonl")} == {2}
