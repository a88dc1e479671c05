"""Disks that fail under a run, for real: a tmpfs that is full, without inodes or read-only from each kind
of write on, a folder that is removed, and a sweep of sizes. tests/faults/disks.py plays the cases and
says what is promised of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disks import NOT_ALLOWED, is_as_promised

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_a_disk_that_fails_is_one_line_and_with_room_again_the_run_is_the_one_never_disturbed(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-m", "tests.faults.disks", "--out", str(tmp_path / "disks")]
    done = subprocess.run(
        words,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    cases = json.loads((tmp_path / "disks.json").read_text())["cases"]
    assert [case for case in cases if not is_as_promised(case)] == []
    assert {case["how"] for case in cases} == {"full", "no inodes", "read-only", "removed", "small"}
    assert {case["code"] for case in cases if case["how"] == "small"} >= {2}, (
        "no size of the sweep was too small"
    )
    assert done.returncode == 0, done.stderr
