"""Which of a run's own and of another run's responses are drafted from, and what is kept of a step for
others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lossless.helpers import CONFIG
from tests.unit.saved.saved_parts import ALONE
from tlt.drafter.drafting.references import REPLAY, References
from tlt.saved.replay import ReplayOf
from tlt.saved.responses import KeptResponses, forget_responses, kept_by, path_of
from tlt.types import Purpose, Request, Reward, Rollout, SamplingParams

PARAMS = SamplingParams(seed=3)


def kept(references: References, request: Request) -> tuple[list[int], int | str] | None:
    found = references.get(request.noise_key)
    return None if found is None else ([*found.token_ids], found.version)


def write(run: Path, purpose: Purpose, number: int, *records: dict[str, Any]) -> None:
    path = path_of(run, purpose, number)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("purpose", "expected"),
    [("rollout", ([11, 12, 9, 10], 4)), ("evaluation", ([7, 8, 9, 10], REPLAY))],
)
def test_what_was_generated_ahead_goes_first_and_an_earlier_evaluation_last(
    purpose: Purpose, expected: tuple[list[int], int | str], tmp_path: Path
) -> None:
    step = 5 if purpose == "rollout" else 0
    own, other, strange = (
        Request(name, 1, (8, 9), PARAMS, purpose, step) for name in ("own", "other", "strange")
    )
    line = {"sample_index": 1, "prompt_ids": [8, 9], "token_ids": [7, 8, 9, 10]}
    of_others = ({"problem_id": "strange"} | line, {"problem_id": "own", **line, "prompt_ids": [9]})
    write(tmp_path, purpose, 5, {"problem_id": "own"} | line, {"problem_id": "other"} | line, *of_others)
    references = References()
    references.keep(own.noise_key, [11, 12], 4)
    prompts = {"own": (8, 9), "other": (8, 9)}
    said: list[str] = []
    replay = ReplayOf(tmp_path, references, ALONE, {purpose: prompts}, PARAMS, CONFIG, said.append)
    with replay.lend(purpose, step, 5):
        assert kept(references, own) == expected
        assert kept(references, other) == ([7, 8, 9, 10], REPLAY)
        assert kept(references, strange) is None, "it is no problem of this run"
    assert [kept(references, one) for one in (own, other)] == [None, None], (
        "they are of use in this phase alone"
    )
    assert not said


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


def test_an_older_runs_files_which_count_from_0_are_replayed_and_renamed_as_steps_are_counted_now(
    tmp_path: Path,
) -> None:
    line = {"problem_id": "own", "sample_index": 0, "prompt_ids": [8, 9]}
    for version in range(3):
        write(tmp_path, "rollout", version, line | {"token_ids": [version], "policy_version": version})
    references, prompts = References(), {"own": (8, 9)}
    replay = ReplayOf(tmp_path, references, ALONE, {"rollout": prompts}, PARAMS, CONFIG, print)
    for step in (1, 2, 3):
        with replay.lend("rollout", step - 1, step):
            found = kept(references, Request("own", 0, (8, 9), PARAMS, "rollout", step - 1))
            assert found == ([step - 1], REPLAY)
    write(tmp_path, "rollout", 3, line | {"token_ids": [2], "policy_version": 2})  # a kill amid renaming
    forget_responses(tmp_path, 3, {0})
    said = {path.name: json.loads(path.read_text())["token_ids"] for path in kept_by(tmp_path, "rollout")}
    assert said == {f"rollout-0000000{step}.jsonl": [step - 1] for step in (1, 2, 3)}


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


def test_a_pipe_among_the_kept_responses_is_no_file_of_a_step(tmp_path: Path) -> None:
    write(tmp_path, "rollout", 1, {})
    os.mkfifo(path_of(tmp_path, "rollout", 2))
    path_of(tmp_path, "rollout", 3).mkdir()
    assert kept_by(tmp_path, "rollout") == [path_of(tmp_path, "rollout", 1)]
    forget_responses(tmp_path, 0, ())
    KeptResponses(tmp_path, str, gib=1.0).write("rollout", 4, 4, phase_of(7))
    assert [path.stem[-1] for path in kept_by(tmp_path, "rollout")] == ["4"]


def test_a_step_looks_at_none_of_the_files_that_are_kept_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        write(tmp_path, "rollout", number, {})
    written = KeptResponses(tmp_path, str, gib=1.0)
    written.write("rollout", 4, 4, phase_of(7))
    monkeypatch.setattr("tlt.saved.responses.kept_by", lambda run, purpose: 1 / 0)
    path_of(tmp_path, "rollout", 1).unlink()  # by the user
    looked: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **named: (looked.append(path), stat(path, **named))[1])
    written.write("rollout", 5, 5, phase_of(7))
    of_responses = {path.name for path in looked if path.parent.name == "responses"}
    assert of_responses == {"rollout-00000005.jsonl"}
    written.gib = 0.0
    written.write("rollout", 6, 6, phase_of(7))
    assert [path.name for path in (tmp_path / "responses").iterdir()] == ["rollout-00000006.jsonl"]


def test_steps_whose_responses_were_removed_are_said_once_and_the_later_ones_are_replayed(
    tmp_path: Path,
) -> None:
    line = {"problem_id": "own", "sample_index": 0, "prompt_ids": [8, 9], "token_ids": [7]}
    write(tmp_path, "rollout", 3, line)
    said: list[str] = []
    prompts = {"own": (8, 9)}
    replay = ReplayOf(tmp_path, References(), ALONE, {"rollout": prompts}, PARAMS, CONFIG, said.append)
    for step in (1, 2, 3, 4, 5):
        with replay.lend("rollout", step, step):
            request = Request("own", 0, (8, 9), PARAMS, "rollout", step)
            assert (kept(replay.references, request) is not None) == (step == 3)
    assert [text.partition("nothing of ")[2] for text in said] == [
        "step 1; it goes on without until rollout-00000003 (older ones exceeded its run.keep_responses)",
        "step 4; it goes on without",
    ]
