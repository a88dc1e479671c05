"""`tlt bench train` on two ranks: what tests/integration checks on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import test_bench_train
from tests.integration.test_run import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


def bench(workspace: Path, words: list[str]) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tlt", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_whole_runs_are_compared_on_two_ranks(workspace: Path, tmp_path: Path) -> None:
    said = bench(workspace, test_bench_train.words_for(workspace, tmp_path))
    test_bench_train.check_comparison(tmp_path, said)
