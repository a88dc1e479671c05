"""Runs in turns: with TLT and without they are the same run, and one that parts is counted and brought
back. On two ranks in proofs/."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Tlt
from tlt.bench.report import with_changes
from tlt.bench.train import OFF, Plan, launch_runs
from tlt.bench.train_report import read_turns
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.ranks.shards import read_into
from tlt.saved.manifest import latest_checkpoint, read_manifest

PLAN = Plan({"off": OFF, "tlt": {}}, num_steps=1, minutes=10.0)


@pytest.fixture
def config(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """One rank, in this process; a fixed strategy."""
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")]))
    overrides = ["--run.num_ranks=1", "--rollout.speculation=4x1x4", "--run.out_dir", str(tmp_path / "runs")]
    return load_config(workspace / "run.toml", overrides)


def weights(run: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    stored = {
        name: tensor for name, tensor in read_manifest(path).tensors.items() if name.startswith("policy.")
    }
    tensors = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in stored.items()}
    read_into(tensors, stored, path)
    return tensors


def words_for(workspace: Path, folder: Path) -> list[str]:
    words = ["bench", "train", str(workspace / "run.toml"), "--steps", "2", "--out", str(folder / "result")]
    return [*words, "--rollout.speculation", "4x1x4", "--run.out_dir", str(folder / "runs")]


def check_comparison(folder: Path, said: str) -> None:
    assert json.loads(said.splitlines()[-1]).keys() == {"tlt", "frozen"}
    report = json.loads((folder / "result.json").read_text())
    assert report["num_steps"] == 2
    assert report["runs"].keys() == {"off", "tlt", "frozen"}
    for name, run in report["runs"].items():
        assert (run["num_different"], run["num_steps_with_same_weights"]) == (0, 2)
        assert (run["accept_length"] is None) == (name == "off")
        assert {"prefill", "update", "publish", "record"} <= run["phase_seconds"].keys()
        assert [step["digest"] for step in run["steps"]] == [
            step["digest"] for step in report["runs"]["off"]["steps"]
        ]
    assert report["runs"]["off"]["steps"][0]["digest"] != report["runs"]["off"]["steps"][1]["digest"]
    moved = [weights(folder / "runs" / name) for name in report["runs"]]
    assert all(torch.equal(moved[0][name], run[name]) for run in moved[1:] for name in run)
    text = (folder / "result.md").read_text()
    assert "| steps that end with off's very weights | 2 | 2 | 2 |" in text
    assert str(folder) not in json.dumps(report["config"])


def test_the_command_compares_whole_runs(
    workspace: Path, tmp_path: Path, tlt_here: Tlt, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tlt_here(*words_for(workspace, tmp_path), "--run.num_ranks", "1") == 0
    check_comparison(tmp_path, capfd.readouterr().out)


def test_a_run_that_parts_is_counted_and_given_the_references_weights(config: Config, tmp_path: Path) -> None:
    """Another seed writes other tokens, which teach the policy otherwise; the reference notices nothing of
    it."""
    plan = dataclasses.replace(
        PLAN, runs={"off": OFF, "same": {}, "other": {"run": {"seed": 1}}}, num_steps=3
    )
    assert launch_runs(config, plan) == 0
    for off, same, other in zip(
        *read_turns(tmp_path / "runs" / "turns.jsonl", plan.runs).values(), strict=True
    ):
        assert same.digest == off.digest != other.digest
        assert (same.num_different, other.num_different) == (0, 16)
        assert (same.same_weights, other.same_weights) == (True, False)
    reference, brought_back = (weights(tmp_path / "runs" / name) for name in ("off", "other"))
    assert all(torch.equal(reference[name], brought_back[name]) for name in reference)


def test_runs_go_on_where_they_ended(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = dataclasses.replace(PLAN, num_steps=2)
    assert launch_runs(config, PLAN) == 0
    assert launch_runs(config, longer) == 0
    path = tmp_path / "runs" / "turns.jsonl"
    off, tlt = read_turns(path, PLAN.runs).values()
    assert [turn.step for turn in off] == [turn.step for turn in tlt] == [1, 2]
    assert [turn.digest for turn in off] == [turn.digest for turn in tlt]

    path.write_text(
        path.read_text() + json.dumps(dataclasses.asdict(off[1])) + "\n"
    )  # as a killed session leaves it
    assert launch_runs(config, longer) == 2
    assert "did not end together; give another --run.out_dir" in capsys.readouterr().err
    changed = with_changes(config, {"optimizer": {"learning_rate": 1.0}})
    with pytest.raises(ValueError, match="holds runs of another configuration"):
        launch_runs(changed, PLAN)
