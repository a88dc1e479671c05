"""`tlt doctor`: its record, its summary and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tlt.apps.cli import main as cli
from tlt.apps.cli.doctor import report, summarize
from tlt.base.io.machine import Facts, Finding, Gpu

FACTS = Facts("3.11", 8, 2**34, gpus=(Gpu("NVIDIA H100", 80 * 2**30),))


def test_this_machine_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"]
    assert found["found"]["torch"]["text"] == version("torch")


def test_a_torch_that_cannot_be_imported_is_told(here: Path) -> None:
    (here / "torch").mkdir()
    (here / "torch/__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(Path(cli.__file__).parents[3])]),
    }
    command = [sys.executable, "-m", "tlt", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == ["torch"]
    assert "libcudart.so.13: cannot open" in found["found"]["torch"]["text"]


def test_what_is_broken_is_the_headline_and_exit_code_1() -> None:
    found = [
        Finding("torch", "ok", "2.13"),
        Finding("triton", "broken", "not installed", "pip install triton"),
        Finding("ray", "missing", "run.launcher ray", "pip install ray"),
    ]
    ended = report(FACTS, found)
    assert ended.exit_code == 1
    summary = summarize(ended.record)
    assert summary.headline == "broken: triton; optional and missing: ray"
    assert summary.rows["broken"]["triton"] == "not installed\npip install triton"
    assert summary.rows["missing"] == {"ray": "run.launcher ray\npip install ray"}
    assert report(FACTS, found[:1]).exit_code == 0
