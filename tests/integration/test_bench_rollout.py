"""`tlt bench rollout --parts workload`: a configuration's own phases on its ranks, with and without speculation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.test_run import PATIENCE


def test_the_configured_phases_are_measured_on_two_ranks(workspace: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "tlt", "bench", "rollout", str(workspace / "run.toml"), "--parts", "workload"]
    words += ["--steps", "2", "--out", str(tmp_path / "result"), "--rollout.speculation", "4x1x4"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    assert list(json.loads(done.stdout.splitlines()[-1])) == ["workload of digits:TASK, 2 ranks"]
    (measured,) = json.loads((tmp_path / "result.json").read_text())["measurements"]
    assert len(measured["pairs"]) == 2
    assert measured["num_different"] == 0, "in float64 speculation changes no token"
    assert measured["num_tokens"] > 0
    assert measured["accept_length"] >= 1
    assert "Median " in (tmp_path / "result.md").read_text()
