"""`tlt report`: the file it writes, and its mistakes."""

import importlib.util
import json
import signal
import socket
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.unit.apps.page.synthetic import make_run
from tlt.apps.cli.main import main
from tlt.apps.page import render
from tlt.apps.page.watch import PageServer
from tlt.base.io.extras import how_to_install


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
    assert "--port: is 70000" in say(str(tmp_path), "--port", "70000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = str(make_run(tmp_path / "run"))
        assert f"--port: {port} cannot be used" in say(run, "--watch", "--port", port)


def test_ctrl_c_ends_watching_at_once_and_without_a_word_also_while_a_page_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, pages = make_run(tmp_path / "run"), list[str]()
    is_making, may_end = threading.Event(), threading.Event()

    def make(folders: object, stamp: str) -> str:
        pages.append(stamp)
        if len(pages) == 2:
            is_making.set()
            may_end.wait(10)
        return "a page"

    def ask_then_interrupt(server: PageServer) -> None:
        if not (run / "failures.log").exists():
            (run / "failures.log").write_text("the page changes")
            threading.Thread(target=urlopen, args=(server.url,), daemon=True).start()
        elif is_making.is_set():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(render, "make_page", make)
    monkeypatch.setattr(PageServer, "service_actions", ask_then_interrupt)
    assert main(["report", str(run), "--watch", "--port", "0"]) == 130
    may_end.set()
    said = capsys.readouterr()
    assert (said.out.count("\n"), said.err) == (1, "")


def test_without_bokeh_the_remedy_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(make_run(tmp_path / "run"))]) == 2
    remedy = how_to_install("report")
    assert f"Bokeh, which draws its charts, is not installed; {remedy}" in capsys.readouterr().err
