"""`tlt report`: the file it writes, and its mistakes."""

import json
from pathlib import Path

import pytest

from tests.unit.apps.page.synthetic import make_run
from tlt.apps.cli.main import main
from tlt.apps.page import render


def test_the_page_lies_in_the_runs_folder_unless_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "make_page", lambda folders: f"{len(folders)} runs: ü")
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    assert main(["report", str(run)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {
        "out": str(run / "report.html"),
        "bytes": (run / "report.html").stat().st_size,
        "runs": [str(run)],
    }
    assert main(["report", str(run), str(other), "--out", str(tmp_path / "new" / "both.html")]) == 0
    assert (tmp_path / "new" / "both.html").read_text() == "2 runs: ü"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(*words: str) -> str:
        assert main(["report", *words]) == 2
        return capsys.readouterr().err

    assert "needs RUN" in say()
    assert "holds no metrics.jsonl" in say(str(tmp_path))
