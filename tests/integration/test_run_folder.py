"""A run's folder that others have changed: what is in the way, or gone, is one line; what is only a
picture ends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tlt.base.io.files import matches
from tlt.training.saved.run_folder import PRODUCTS, WRITTEN

FEW = "--run.num_ranks 1 --evaluation.num_problems 0 --rollout.speculation off --drafter.train false"


def begin(tlt_here: Tlt, workspace: Path, out_dir: Path, num_steps: int = 1) -> int:
    run = (str(workspace / "run.toml"), "--run.out_dir", str(out_dir), "--run.num_steps", str(num_steps))
    return tlt_here("train", *run, *FEW.split())


def go_on(tlt_here: Tlt, out_dir: Path, num_steps: int) -> int:
    return tlt_here("train", "--resume", str(out_dir), "--run.num_steps", str(num_steps))


def test_a_run_writes_no_name_but_those_by_which_foreign_files_are_looked_for(
    workspace: Path, tmp_path: Path, tlt_here: Tlt
) -> None:
    words = ("--run.num_steps", "1", "--run.num_ranks", "1", "--lora.rank", "2", "--run.keep_responses", "1")
    out_dir = tmp_path / "run"
    assert tlt_here("train", str(workspace / "run.toml"), "--run.out_dir", str(out_dir), *words) == 0
    written = [path.name for path in out_dir.iterdir()]
    assert {*PRODUCTS, ".lock"} <= {*written}
    assert [name for name in written if not matches(name, WRITTEN)] == []
    for name, own in PRODUCTS.items():
        assert [path.name for path in (out_dir / name).iterdir() if not matches(path.name, own)] == []


def test_a_journal_with_folders_and_a_damaged_timeline_and_tracking_file_end_no_run_that_goes_on(
    workspace: Path, tmp_path: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "run"
    assert begin(tlt_here, workspace, out_dir) == 0
    run = json.loads((out_dir / "tracking.json").read_text())
    (out_dir / "journal/step-00000001/replica-00000.0").mkdir(parents=True)
    (out_dir / "tracking.json").write_text("torn")
    (out_dir / "timeline.rank0.jsonl").write_bytes(b"\xff\x00\n" * 9)
    (out_dir / "timeline.rankx.jsonl").write_text("no rank's\n")
    capsys.readouterr()
    assert go_on(tlt_here, out_dir, 2) == 0
    said = capsys.readouterr().out
    assert said.count("replica-00000.0: is a folder, where the journal has files") == 1
    assert said.count("timeline.rank0.jsonl: 9 of its ") == 1
    assert said.count("tracking.json: cannot be read, and is kept as tracking.json.unreadable") == 1
    assert json.loads((out_dir / "tracking.json").read_text()) == run
