"""`tlt bench rollout --parts workload`: a configuration's own phases, with and without speculation; on two ranks in proofs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Tlt


def words_for(workspace: Path, folder: Path) -> list[str]:
    words = ["bench", "rollout", str(workspace / "run.toml"), "--parts", "workload", "--steps", "2"]
    return [*words, "--out", str(folder / "result"), "--rollout.speculation", "4x1x4"]


def check_phases(folder: Path, said: str, num_ranks: int) -> None:
    assert list(json.loads(said.splitlines()[-1])) == [f"workload of digits:TASK, {num_ranks} ranks"]
    (measured,) = json.loads((folder / "result.json").read_text())["measurements"]
    assert len(measured["pairs"]) == 2
    assert measured["num_different"] == 0, "in float64 speculation changes no token"
    assert measured["num_tokens"] > 0
    assert measured["accept_length"] >= 1
    assert "Median " in (folder / "result.md").read_text()


def test_the_configured_phases_are_measured(
    workspace: Path, tmp_path: Path, tlt_here: Tlt, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tlt_here(*words_for(workspace, tmp_path), "--run.num_ranks", "1") == 0
    check_phases(tmp_path, capfd.readouterr().out, 1)
