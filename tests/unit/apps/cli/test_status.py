"""`tlt status`: its record, its summary and its mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.apps.cli.parts import fail, succeed
from tests.unit.training.saved.written_run import write_run
from tlt.apps.cli import main as cli
from tlt.apps.cli.status import summarize
from tlt.training.saved.run_folder import FolderLock


def test_the_command_gives_a_record_and_a_summary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "run", num_steps=10, done=7, checkpoint=5)
    found = succeed(capsys, "status", "run")
    assert (found["state"], found["step"], found["num_steps"], found["checkpoint"]) == ("stopped", 7, 10, 5)
    assert [line["step"] for line in found["last_steps"]] == [3, 4, 5, 6, 7]
    assert found["held_out"] == [{"step": 0, "solve_rate": 0.25, "reward": None}]
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


def test_a_run_with_keys_of_another_version_has_a_status_and_a_damaged_one_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(here / "run", num_steps=10, done=1)
    (folder / "config.json").write_text('{"run": {"num_steps": 10, "long_gone": true}}')
    assert succeed(capsys, "status", "run")["num_steps"] == 10
    (folder / "config.json").write_text('{"run": {')
    assert fail(capsys, "status", "run").startswith("run/config.json: cannot be read (")


def test_a_run_before_its_first_step_has_a_status(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_run(here / "run", num_steps=10, done=0) / "metrics.jsonl").unlink()
    assert cli.main(["status", "run"]) == 0
    assert summarize(json.loads(capsys.readouterr().out)).headline == "stopped: step 0 of 10"


def test_status_loads_no_torch(here: Path) -> None:
    write_run(here / "run", num_steps=10, done=1)
    code = "import sys; from tlt.apps.cli.main import main; main(['status', 'run']); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[3])}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
