"""Whole runs with DAPO: what is sampled again is the same with speculation on and off, on one rank and
two, after a resume."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_run import command, records, same_weights, train, what_the_law_fixes

pytestmark = pytest.mark.slow

COUNTS = (
    *(f"rollout/{name}" for name in ("groups_sampled", "groups_discarded", "resample_rounds", "num_tokens")),
    "update/zero_variance_groups",
    "rewards/mean",
)


@pytest.fixture(scope="module")
def dapo(workspace: Path) -> tuple[str, ...]:
    """A task with rewards of 0 and 1, of which many groups agree."""
    text = (workspace / "digits.py").read_text()
    assert '"reward": share' in text
    (workspace / "coarse.py").write_text(text.replace('"reward": share', '"reward": float(share > 0.6)'))
    words = {
        "task.name": "coarse:TASK",
        "task.num_problems": "6",
        "algorithm.name": "dapo",
        "rollout.samples_per_problem": "2",
        "run.num_steps": "4",
        "evaluation.num_problems": "0",
    }
    return tuple(word for key, value in words.items() for word in (f"--{key}", value))


@pytest.fixture(scope="module")
def plain(workspace: Path, dapo: tuple[str, ...]) -> Path:
    nothing = ("--rollout.speculation", "off", "--drafter.train", "false")
    return train(workspace, "plain", *dapo, *nothing)


def counts(out_dir: Path) -> list[dict[str, Any]]:
    return [{key: record.figures()[key] for key in COUNTS} for record in records(out_dir)]


def test_groups_without_a_signal_are_replaced_and_counted(plain: Path) -> None:
    written = records(plain)
    assert {record.algorithm for record in written} == {"dapo"}
    for record in written:
        assert record.rollout.groups_discarded == record.rollout.groups_sampled - 4
        assert record.rollout.num_responses == 2 * record.rollout.groups_sampled
        assert record.rollout.resample_rounds <= 4
    assert sum(record.rollout.groups_discarded for record in written) > 4
    assert any(record.rollout.groups_sampled > 6 for record in written), "problems came again in some step"


def test_speculation_on_and_off_are_the_same_run(workspace: Path, dapo: tuple[str, ...], plain: Path) -> None:
    on = train(workspace, "speculating", *dapo, "--rollout.speculation", "4x1x4")
    assert counts(on) == counts(plain)
    assert what_the_law_fixes(on) == what_the_law_fixes(plain)
    assert same_weights(on, plain)
    assert all(record.rollout.accept_length >= 1 for record in records(on))


def test_a_resumed_run_is_the_same_run(workspace: Path, dapo: tuple[str, ...], plain: Path) -> None:
    out_dir = train(workspace, "resumed", *dapo, "--rollout.speculation", "4x1x4", "--run.num_steps", "2")
    words, environment = command(workspace, "--resume", str(out_dir), "--run.num_steps", "4")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    assert counts(out_dir) == counts(plain)
    assert same_weights(out_dir, plain)
