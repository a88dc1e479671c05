"""Where a run stands: while it goes on, after its end and after a kill."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.training.saved.written_run import write_run
from tlt.training.saved.run_folder import FolderLock
from tlt.training.saved.run_status import read_status


def test_a_run_that_goes_on_is_known_by_its_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=10, done=4, checkpoint=3)
    lock = FolderLock(folder)
    status = read_status(folder)
    assert (status.state, status.step, status.seconds_left) == ("running", 4, 360.0)
    assert status.process in (None, os.getpid())  # /proc/locks is not everywhere
    assert status.on_resume == "refused while it runs"
    lock.release()
    assert read_status(folder).state == "stopped"
    FolderLock(folder).release()  # asking has left no lock behind


def test_a_killed_run_says_what_resuming_would_do_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=10, done=6, checkpoint=3)
    (folder / "journal/step-00000004").mkdir(parents=True)
    (folder / "journal/step-00000004/replica").touch()
    status = read_status(folder)
    command = f"tlt train --resume {folder}"
    assert status.on_resume == (
        f"goes on after step 3; does steps 4 to 6 again, with the responses in the journal: {command}"
    )
    assert status.seconds_left is None
    begun = write_run(tmp_path / "begun", num_steps=10, done=1)
    assert read_status(begun).on_resume.startswith("begins again; does step 1 again: ")


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=4, done=4, checkpoint=4)
    assert read_status(folder).state == "stopped", "its policy is not written yet"
    (folder / "policy").mkdir()
    (folder / "policy/config.json").touch()
    status = read_status(folder)
    assert status.state == "finished"
    assert status.on_resume.endswith("--run.num_steps 8")
    only_evaluates = write_run(tmp_path / "evaluates", num_steps=0, done=0)
    assert read_status(only_evaluates).state == "finished"


def test_restarts_are_counted_and_the_last_cause_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=4, done=1)
    entry = "2026-11-25 09:00:0{} rank 0 failed: boom {}\nTraceback\n  2026\n"
    (folder / "failures.log").write_text(entry.format(1, 1) + entry.format(2, 2))
    assert read_status(folder).failures[-1] == ("2026-11-25 09:00:02", "rank 0 failed: boom 2")
    assert len(read_status(folder).failures) == 2
