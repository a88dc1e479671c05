"""A run's folder that others have changed: what is in the way, or gone, is one line; what is only a
picture ends nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tlt.base.io.files import matches
from tlt.training.saved import checkpoint
from tlt.training.saved.run_folder import PRODUCTS, WRITTEN

FEW = (
    "--run.num_ranks",
    "1",
    "--evaluation.num_problems",
    "0",
    "--rollout.speculation",
    "off",
    "--drafter.train",
    "false",
)


def begin(tlt_here: Tlt, workspace: Path, out_dir: Path, num_steps: int = 1) -> int:
    return tlt_here(
        "train",
        str(workspace / "run.toml"),
        "--run.out_dir",
        str(out_dir),
        *FEW,
        "--run.num_steps",
        str(num_steps),
    )


def go_on(tlt_here: Tlt, out_dir: Path, num_steps: int) -> int:
    return tlt_here("train", "--resume", str(out_dir), "--run.num_steps", str(num_steps))


def test_a_file_where_the_journal_goes_is_one_line(
    workspace: Path, tmp_path: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "journal").write_text("mine")
    assert begin(tlt_here, workspace, out_dir) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: error: run.out_dir: {out_dir} holds journal, which a run would write over;")
    assert (out_dir / "journal").read_text() == "mine"


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


@pytest.mark.parametrize(
    ("out", "name", "told"),
    [
        ("out", "out/journal/2026.md", "holds journal, which a run would write over"),
        ("out", "out/drafter/notes.txt", "holds drafter, which a run would write over"),
        ("model", "model/notes.txt", "holds config.json, which a run would write over"),
        ("model/run", "notes.txt", "lies in model.path, "),
        (".", "notes.txt", "holds drafter, which a run would write over"),
    ],
)
def test_a_run_that_would_write_over_files_of_the_users_is_one_line_before_anything_is_written(
    out: str,
    name: str,
    told: str,
    workspace: Path,
    tmp_path: Path,
    tlt_here: Tlt,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in ("model", "drafter"):
        shutil.copytree(workspace / folder, tmp_path / folder)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ("--model.path", str(tmp_path / "model"), "--drafter.path", str(tmp_path / "drafter"))
    words += ("--run.out_dir", str(tmp_path / out))
    assert tlt_here("train", str(workspace / "run.toml"), *words, "--run.num_ranks", "1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tlt: error: run.out_dir: ")
    assert told in line
    assert line.endswith("; give another --run.out_dir")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


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


def test_a_folder_that_is_removed_under_a_run_is_said_and_does_not_come_back(
    workspace: Path,
    tmp_path: Path,
    tlt_here: Tlt,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out_dir, save = tmp_path / "run", checkpoint.CheckpointWriter.save

    def remove(self: checkpoint.CheckpointWriter, *arguments: checkpoint.Checkpoint) -> None:
        save(self, *arguments)
        self.wait()
        shutil.rmtree(out_dir)

    monkeypatch.setattr(checkpoint.CheckpointWriter, "save", remove)
    words = ("--run.checkpoint_every", "1", "--run.num_steps", "3")
    assert tlt_here("train", str(workspace / "run.toml"), "--run.out_dir", str(out_dir), *FEW, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"tlt: error: run.out_dir: {out_dir} has been removed, or moved, under the run; bring it back"
    )
    assert not out_dir.exists()
