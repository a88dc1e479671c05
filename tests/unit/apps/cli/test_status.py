"""`tlt status`: its record, its summary and its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.apps.cli.parts import fail, succeed
from tests.unit.training.saved.written_run import write_run
from tlt.apps.cli.status import summarize
from tlt.training.saved.run_folder import FolderLock


def test_the_command_gives_a_record_and_a_summary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "run", num_steps=10, done=7, checkpoint=5)
    found = succeed(capsys, "status", "run")
    assert (found["state"], found["step"], found["num_steps"], found["checkpoint"]) == ("stopped", 7, 10, 5)
    assert [line["step"] for line in found["last_steps"]] == [3, 4, 5, 6, 7]
    assert found["held_out"] == [{"step": 0, "solve_rate": 0.25, "reward": 0.25}]
    assert summarize(found).headline == "stopped: step 7 of 10"


@pytest.mark.parametrize(
    ("num_steps", "done", "headline"),
    [
        (3, 3, "running: step 3 of 3, evaluates or saves"),
        (0, 0, "running: step 0 of 0, evaluates or saves"),
        (3, 2, "running: step 2 of 3, 1 min 00 s left"),
        (3, 0, "running: step 0 of 3"),
    ],
)
def test_a_run_without_a_step_left_says_what_goes_on_and_no_time(
    here: Path, capsys: pytest.CaptureFixture[str], num_steps: int, done: int, headline: str
) -> None:
    lock = FolderLock(write_run(here / "run", num_steps, done))
    assert summarize(succeed(capsys, "status", "run")).headline == headline
    lock.release()


def test_a_folder_without_a_run_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(capsys, "status", "run") == (
        "run: holds no run (no config.json); give the folder of one (run.out_dir)"
    )
