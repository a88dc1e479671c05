"""`tlt doctor`: its record, its summary and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tlt.apps.cli import main as cli
from tlt.apps.cli.doctor import report, summarize
from tlt.base.io.machine import Facts, Finding, Gpu

FACTS = Facts("3.11", 8, 2**34, gpus=(Gpu("NVIDIA H100", 80 * 2**30),))


def test_this_machine_works_and_every_auto_is_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert found["found"]["run.device"]["text"].startswith(device)
    assert {"run.num_ranks", "run.dtype", "parallel.policy", "rollout.kv_gib"} <= found["found"].keys()


def test_a_key_that_cannot_be_resolved_is_broken_with_the_errors_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (here / "run.toml").write_text(
        'run.device = "cuda"\nrun.num_ranks = 2\nmodel.path = "m"\ntask.name = "countdown"\n'
    )
    (here / "m").mkdir()
    assert cli.main(["doctor", "run.toml"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["broken"][0] == "run.device"
    assert found["found"]["run.device"]["text"] == (
        "run.device: cuda, but no GPU was found; give --run.device cpu"
    )
    assert found["found"]["run.dtype"]["text"] == "as run.device"
    assert str(summarize(found).rows).count("no GPU was found") == 1


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
        Finding("run.device", "ok", "cuda (1 of 1 GPU(s))"),
        Finding("run.num_ranks", "broken", "no such model"),
    ]
    ended = report(FACTS, found, "countdown")
    assert ended.exit_code == 1
    summary = summarize(ended.record)
    assert summary.headline == "broken: triton, run.num_ranks; optional and missing: ray"
    assert summary.rows["auto, for countdown"]["run.device"] == "cuda (1 of 1 GPU(s))"
    assert summary.rows["broken"]["triton"] == "not installed\npip install triton"
    assert summary.rows["missing"] == {"ray": "run.launcher ray\npip install ray"}
    assert report(FACTS, found[:1], "countdown").exit_code == 0
