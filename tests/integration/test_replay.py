"""Runs that keep their responses, and runs that draft from those of another: the result is that of the run
without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Tlt
from tests.integration.programs import Programs
from tests.integration.test_run import PATIENCE, records, same_weights, train, what_the_law_fixes
from tlt.engine.stats import EngineStats
from tlt.saved.responses import kept_by

pytestmark = pytest.mark.timeout(3 * PATIENCE)
FOLLOWS = (
    "--rollout.speculation",
    "ahead+hybrid:64x1x64",
    "--drafter.train",
    "false",
    "--evaluation.every",
    "2",
)
STEPS = ("--run.num_steps", "4", *FOLLOWS)
SLOWER = ("--optimizer.learning_rate", "1e-3")


def begin(tlt: Tlt, workspace: Path, name: str, *words: str) -> Path:
    """A run on one rank, in this process."""
    out_dir = workspace / name
    given = (str(workspace / "run.toml"), "--run.out_dir", str(out_dir), "--run.num_ranks", "1", *STEPS)
    assert tlt("train", *given, *words) == 0
    return out_dir


@pytest.fixture
def first(workspace: Path, tlt_here: Tlt) -> Path:
    """A run of three steps that has kept its responses, made once."""
    if not (workspace / "first").exists():
        begin(tlt_here, workspace, "first", "--run.num_steps", "3", "--run.keep_responses", "1")
    return workspace / "first"


@pytest.fixture
def alone(workspace: Path, tlt_here: Tlt) -> Path:
    """Another learning rate, and a step more, without references of another run; made once."""
    return (
        workspace / "alone"
        if (workspace / "alone").exists()
        else begin(tlt_here, workspace, "alone", *SLOWER, "--run.keep_responses", "0")
    )


def replayed(out_dir: Path) -> list[int]:
    return [record.rollout.followed_by_age.get("replay", 0) for record in records(out_dir)]


def assert_same(out_dir: Path, alone: Path) -> None:
    assert what_the_law_fixes(out_dir) == what_the_law_fixes(alone)
    assert same_weights(out_dir, alone)
    one, other = (
        [*map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())] for run in (out_dir, alone)
    )
    assert [line["by_problem"] for line in one] == [line["by_problem"] for line in other]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def undrafted(path: Path) -> list[dict[str, Any]]:
    """The responses without who drafted them, which depends on the references that there are."""
    return [{key: value for key, value in line.items() if key != "drafts"} for line in lines(path)]


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


def test_a_replay_with_another_learning_rate_is_the_run_without_it(
    workspace: Path, first: Path, alone: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = begin(tlt_here, workspace, "replay", *SLOWER, "--replay", str(first))
    assert_same(replay, alone)
    followed = replayed(replay)
    assert followed[0] >= 0.9 * (records(replay)[0].rollout.num_tokens - 32), (
        "the first policy is the same: all is kept"
    )
    assert followed[1] > 0
    assert followed[3] == 0
    assert capsys.readouterr().out.count("has kept nothing of step 4; it goes on without") == 1


def test_what_of_a_replayed_run_cannot_be_read_is_said_and_left_out(
    workspace: Path, first: Path, alone: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = workspace / "damaged"
    shutil.copytree(first, damaged)
    torn, foreign, strange = (damaged / "responses" / f"rollout-0000000{step}.jsonl" for step in (2, 3, 1))
    torn.write_text(torn.read_text()[:-40])
    foreign.write_text(
        json.dumps({"problem_id": "of another task", "prompt_ids": [1], "token_ids": [1]}) + "\n"
    )
    some = lines(strange)
    strange.write_text(
        "".join(json.dumps({**one, "token_ids": one["token_ids"][::-1]}) + "\n" for one in some[1:])
    )
    (damaged / "responses" / "evaluation-00000000.jsonl").write_bytes(b"\xff\xfe\x00")
    replay = begin(tlt_here, workspace, "careless", *SLOWER, "--replay", str(damaged))
    assert_same(replay, alone)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{torn.name}:16: not valid JSON" in said
    assert said.count("this file is left out") == 2, "the torn one and the evaluation's"
    assert replayed(replay)[1:] == [0, 0, 0]


def test_two_ranks_replay_what_one_has_kept(workspace: Path, first: Path, programs: Programs) -> None:
    plain = train(workspace, "two-alone", *STEPS, *SLOWER, "--run.num_steps", "2", programs=programs)
    words = (*STEPS, *SLOWER, "--run.num_steps", "2", "--replay", str(first), "--rollout.ahead", "1")
    replay = train(workspace, "two-replay", *words, programs=programs)
    assert_same(replay, plain)
    assert sum(replayed(replay)) > 0


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_resumed_run_keeps_what_counts_and_drafts_from_what_was_before(
    is_damaged: bool,
    workspace: Path,
    first: Path,
    tlt_here: Tlt,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    again = workspace / f"again-{is_damaged}"
    shutil.copytree(first, again)
    expected = {path.name: undrafted(path) for path in (again / "responses").iterdir()}
    (again / "responses" / "rollout-00000007.jsonl").write_text(
        "{}\n"
    )  # of an attempt that is gone back behind
    shutil.rmtree(again / "checkpoints" / "step-00000003")
    if is_damaged:
        (again / "references.safetensors").write_bytes(b"no tensors at all")
    followed, record = [], EngineStats.record_reference
    monkeypatch.setattr(
        EngineStats, "record_reference", lambda *given: (followed.append(given[-1]), record(*given))
    )
    assert tlt_here("train", "--resume", str(again)) == 0
    assert {path.name: undrafted(path) for path in (again / "responses").iterdir()} == expected
    assert (sum(followed) > 0) != is_damaged, (
        "one rank generates nothing ahead: these are the last evaluation's"
    )
    assert (
        "is left out, for it is not as it was written" in " ".join(capsys.readouterr().out.split())
    ) == is_damaged


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replay", "nowhere"), "does not exist; give the folder of a run"),
        (("--replay", "first/responses"), "holds no run (no config.json that can be read)"),
        (("--replay", "alone"), "has kept no responses; repeat it with --run.keep_responses 1"),
        (("--replay", "first", "--run.seed", "4"), "has run.seed 0, this run 4"),
        (("--replay", "first", "--task.num_problems", "13"), "has task.num_problems 12, this run 13"),
        (("--replay", "first", "--task.options.first", "2"), "has task.options {}, this run {'first': 2}"),
        (
            ("--replay", "first", "--rollout.problems_per_step", "2"),
            "has rollout.problems_per_step 4, this run 2",
        ),
        (("--replay", "large"), "token id 99999 is outside the vocabulary of 24"),
        (("--replay", "other"), "answers none of this run's prompts"),
        (
            ("--replay", "first", "--rollout.speculation", "off"),
            "nothing would draft from that run's responses",
        ),
        (
            ("--replay", "first", "--rollout.references_mib", "0"),
            "nothing would draft from that run's responses",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    words: tuple[str, ...],
    said: str,
    workspace: Path,
    first: Path,
    alone: Path,
    tlt_here: Tlt,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(workspace)
    for name, change in (("large", {"token_ids": [3, 99999]}), ("other", {"prompt_ids": [3, 4]})):
        if not (workspace / name).exists():
            shutil.copytree(first, workspace / name)
            path = workspace / name / "responses" / "rollout-00000001.jsonl"
            path.write_text("".join(json.dumps(one | change) + "\n" for one in lines(path)))
    capsys.readouterr()
    given = ("train", "run.toml", "--run.out_dir", "refused", "--run.num_ranks", "1", *STEPS)
    assert tlt_here(*given, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
