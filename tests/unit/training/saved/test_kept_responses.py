"""What a run keeps of its responses, and which files of an earlier attempt go."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tlt.base.types import Purpose, Reward, Rollout
from tlt.training.saved.kept_responses import KeptResponses, forget_responses, kept_by, path_of


def write(run: Path, purpose: Purpose, number: int, *records: dict[str, Any]) -> None:
    path = path_of(run, purpose, number)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_judgement_says_what_was_scored_and_why_not() -> None:
    written = KeptResponses(Path(), lambda ids: f"{len(ids)} tokens", gib=1.0)
    rollout = Rollout("p", 2, (3,), (4, 5), (-0.1, -0.2), "length", 6)
    rewards = [Reward(0.5, True, parts={"a": 1.0}), Reward(float("nan"), False, error="timed out")]
    one, other = (written.record("rollout", 6, rollout, reward) for reward in rewards)
    assert (one["text"], one["reward"], one["is_solved"], one["reward_parts"]) == (
        "2 tokens",
        0.5,
        True,
        {"a": 1.0},
    )
    assert (other["reward"], other["reward_error"], other["policy_version"]) == (None, "timed out", 6)
    assert "reward_error" not in one
    assert "reward_parts" not in other


def test_what_a_later_attempt_contradicts_is_removed(tmp_path: Path) -> None:
    for number in (1, 4, 5):
        write(tmp_path, "rollout", number, {})
        write(tmp_path, "evaluation", number - 1, {})
    (tmp_path / "responses" / "rollout-of-mine.jsonl").write_text("{}")
    forget_responses(tmp_path, 4, {0})
    left = [path.name for path in (*kept_by(tmp_path, "rollout"), *kept_by(tmp_path, "evaluation"))]
    assert left == [
        "rollout-00000001.jsonl",
        "rollout-00000004.jsonl",
        "evaluation-00000000.jsonl",
    ]


def phase_of(*token_ids: int) -> Any:
    rollout = Rollout("p0", 0, (1, 2), token_ids, (-0.5,) * len(token_ids), "stop", 0)
    return SimpleNamespace(rollouts=[rollout], rewards=[Reward(1.0, True)])


def test_the_oldest_steps_go_first_where_responses_exceed_their_bound_which_is_said_once(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    written = KeptResponses(tmp_path, str, gib=1.0, say=said.append)
    written.write("evaluation", 0, 0, phase_of(7))
    size = path_of(tmp_path, "evaluation", 0).stat().st_size
    written.gib = 3.5 * size / 2**30
    for step in (1, 2, 3, 4):
        written.write("rollout", step, step, phase_of(7))
    assert [path.stem[-1] for path in kept_by(tmp_path, "rollout")] == ["3", "4"]
    assert [path.stem[-1] for path in kept_by(tmp_path, "evaluation")] == ["0"]
    assert len(said) == 1
    assert "the oldest steps' responses go, now and later (run.keep_responses)" in said[0]
    written.gib = 0.5 * size / 2**30
    written.write("rollout", 5, 5, phase_of(7))
    assert [path.stem[-1] for path in kept_by(tmp_path, "rollout")] == ["5"], "the latest stays"
    assert kept_by(tmp_path, "evaluation") == []
